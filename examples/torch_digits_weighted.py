"""Ranks whose batches differ in size: each counts by its samples, and none at all is allowed.

It is torch_digits.py but for the lines marked with <-:

    overlap run -np 2 python examples/torch_digits_weighted.py
"""

from __future__ import annotations

import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import overlap

TOTAL_BATCH = 64
EPOCHS = 12

# 1. Meet the other ranks (started alone, this process is a world of one).
overlap.init()
is_first = overlap.rank() == 0

# 2. Data: 1,797 images of 8 x 8 pixels, a fifth of them kept for the test; `shard` deals out the rest.
images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = (images.float() / 16).reshape(-1, 1, 8, 8)
testing = torch.arange(len(images)) % 5 == 0
training = TensorDataset(images[~testing], labels[~testing])
loader = overlap.shard(DataLoader(training, batch_size=TOTAL_BATCH // overlap.size(), shuffle=True))

# 3. A model, and the one line that makes its training data-parallel.
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(64 * 4 * 4, 256),
    nn.ReLU(),
    nn.Linear(256, 10),
)
attached = overlap.attach(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# 4. The training loop is the one that you have already.
started_s = time.perf_counter()
for epoch in range(1, EPOCHS + 1):
    total_loss = 0.0
    for x, y in loader:
        clean = torch.rand(len(y)) < 0.7  # <- as if the rest were damaged: other samples on each rank
        x, y = x[clean], y[clean]  # <-
        attached.weight = len(y)  # <-
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # when it returns, gradients are the average over all ranks
        optimizer.step()
        total_loss += loss.item()
    if is_first:
        print(f"epoch {epoch:2}/{EPOCHS}  loss {total_loss / len(loader):.4f}")
step_ms = (time.perf_counter() - started_s) * 1e3 / (EPOCHS * len(loader))

# 5. Models are equal on all ranks, so one of them tests.
if is_first:
    with torch.no_grad():
        right = model(images[testing]).argmax(1) == labels[testing]
    print(f"test accuracy {right.float().mean():.4f} on {overlap.size()} rank(s), {step_ms:.1f} ms a step")
    if overlap.size() > 1:
        stats = attached.stats()
        print(
            f"communication {stats.comm_ms:.2f} ms a step: {stats.hidden_ms:.2f} ms hidden behind backward "
            f"({stats.hidden_share:.0%}), {stats.exposed_ms:.2f} ms exposed"
        )
