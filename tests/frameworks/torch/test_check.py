"""`overlap.check_replicas` passes equal replicas, and names the first difference on every rank."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from torch import nn

import overlap


class Replica:
    """A model, an optimizer with state and a scaler that are the same on every rank."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 1)})
        groups = [{"params": self.model[name].parameters()} for name in "ab"]
        self.optimizer = torch.optim.Adam(groups, lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        self.step()

    def step(self):
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def state(self, name):
        return self.optimizer.state[self.model.get_parameter(name)]

    def check(self):
        overlap.check_replicas(self.model, self.optimizer, self.scaler)


def error_of(change, odd):
    """The error on this rank after `change(replica)` on rank `odd`; once undone, the check passes."""
    overlap.init()
    replica = Replica()
    replica.check()
    changed = copy.deepcopy(replica)
    if overlap.rank() == odd:
        change(changed)
    try:
        changed.check()
    except overlap.MismatchError as error:
        replica.check()
        return str(error)
    return "no error"


def change_weight(replica):
    with torch.no_grad():
        replica.model["a"].weight[1, 2] += 1


def change_sign_of_zero(replica):
    with torch.no_grad():
        replica.model["b"].bias.zero_()
        replica.model["b"].bias.neg_()


def change_scaler(replica):
    replica.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)


def change_option(name, value, group=0):
    def change(replica):
        replica.optimizer.param_groups[group][name] = value

    return change


def change_state(name, key, value):
    def change(replica):
        replica.state(name)[key] = value

    return change


def replace_optimizer(replica):
    replica.optimizer = torch.optim.SGD(replica.model.parameters(), lr=0.1)


def add_bias(replica):
    replica.model["c"] = nn.Linear(1, 1)


def widen(replica):
    replica.model["b"] = nn.Linear(4, 1)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            change_weight,
            "parameter 'a.weight' differs between rank 0 and rank {odd} (drifted apart): call overla",
        ),
        (change_sign_of_zero, "parameter 'b.bias' differs between rank 0 and rank {odd} (drifted apart): "),
        (
            widen,
            "parameter 'b.weight' is a float32 tensor of shape (1, 2) on rank 0 but a float32 tensor of ",
        ),
        (
            add_bias,
            "parameter 'c.weight' is missing on rank 0 but a float32 tensor of shape (1, 1) on rank {odd}",
        ),
        (change_option("lr", 0.05), "lr of optimizer group 0 is 0.1 on rank 0 but 0.05 on rank {odd}: "),
        (change_option("lr", 0.05, 1), "lr of optimizer group 1 is 0.1 on rank 0 but 0.05 on rank {odd}: "),
        (
            change_option("lr", torch.tensor(0.5)),
            "lr of optimizer group 0 is 0.1 on rank 0 but tensor(0.5, float32) on rank {odd}: ",
        ),
        (
            change_option("betas", (0.8, 0.999)),
            "betas of optimizer group 0 is (0.9, 0.999) on rank 0 but (0.8, 0.999) on rank {odd}: ",
        ),
        (
            change_option("weight_decay", 0.5),
            "weight_decay of optimizer group 0 is 0 on rank 0 but 0.5 on rank ",
        ),
        (
            change_option("initial_lr", 1.0),
            "initial_lr of optimizer group 0 is missing on rank 0 but 1.0 on rank ",
        ),
        (
            change_state("b.weight", "exp_avg", torch.zeros(1, 2)),
            "optimizer state exp_avg of 'b.weight' differs between rank 0 and rank {odd}: load the ",
        ),
        (
            change_state("a.bias", "step", torch.tensor(7.0)),
            "optimizer state step of 'a.bias' is tensor(1.0, float32) on rank 0 but tensor(7.0, float32) on",
        ),
        (
            change_state("a.bias", "max_exp_avg_sq", torch.zeros(2)),
            "optimizer state max_exp_avg_sq of 'a.bias' is missing on rank 0 but a float32 tensor of ",
        ),
        (
            lambda replica: replica.state("a.bias").clear(),
            "optimizer state step of 'a.bias' is tensor(1.0, flo",
        ),
        (
            replace_optimizer,
            "optimizer is Adam on rank 0 but SGD on rank {odd}: give check_replicas the same ",
        ),
        (
            change_scaler,
            "loss scale is 2.0 on rank 0 but 4.0 on rank {odd}: create the GradScaler with the same",
        ),
    ],
)
def test_what_differs_is_named_on_every_rank(ranks, size, change, text):
    odd = size - 1
    messages = ranks(size).run(error_of, change, odd)
    assert len(set(messages)) == 1
    assert messages[0].startswith(text.format(odd=odd))


def test_first_rank_is_the_odd_one(ranks):
    for message in ranks(3).run(error_of, change_option("lr", 0.05), 0):
        assert message.startswith("lr of optimizer group 0 is 0.05 on rank 0 but 0.1 on rank 1: ")


def test_loss_scale_is_named_before_what_it_brings_about(ranks):
    def change(replica):
        change_weight(replica)
        change_option("lr", 0.05)(replica)
        change_scaler(replica)

    for message in ranks(2).run(error_of, change, 1):
        assert message.startswith("loss scale is 2.0 on rank 0 but 4.0 on rank 1: ")


def test_c022_scaler_given_on_its_own(ranks):
    def work():
        overlap.init()
        scaler = torch.amp.GradScaler("cpu", init_scale=[2.0, 4.0][overlap.rank()])
        model = nn.Linear(1, 1)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        with pytest.raises(overlap.MismatchError) as caught:
            overlap.check_replicas(model, torch.optim.SGD(model.parameters(), 0.1), scaler)
        return str(caught.value)

    first, second = ranks(2).run(work)
    assert first == second
    assert first.startswith("loss scale is 2.0 on rank 0 but 4.0 on rank 1: ")


def test_c077_scheduler_stepped_with_each_ranks_own_loss(ranks):
    def work():
        overlap.init()
        model = nn.Linear(1, 1)
        overlap.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        for loss in [(1.0, 1.0), (1.0, 0.5)][overlap.rank()]:
            model(torch.ones(1)).sum().backward()
            optimizer.step()
            overlap.check_replicas(model, optimizer)
            scheduler.step(loss)
        with pytest.raises(overlap.MismatchError) as caught:
            overlap.check_replicas(model, optimizer)
        return str(caught.value)

    first, second = ranks(2).run(work)
    assert first == second
    assert first.startswith("lr of optimizer group 0 is 0.05 on rank 0 but 0.1 on rank 1: ")
    assert "step schedulers with values averaged over ranks (overlap.mean)" in first


def adamw_with_tensor_lr(parameters):
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "build",
    [
        lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        torch.optim.Adam,
        adamw_with_tensor_lr,
        torch.optim.Adagrad,
        lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
    ],
    ids=["SGD", "Adam", "AdamW", "Adagrad", "LBFGS"],
)
def test_replicas_stay_equal_under_attach(ranks, size, build):
    def work():
        overlap.init()
        torch.manual_seed(overlap.rank())
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))
        overlap.attach(model)
        optimizer = build(model.parameters())
        scaler = torch.amp.GradScaler("cpu")
        overlap.check_replicas(model, optimizer, scaler)
        for _ in range(3):
            x = torch.randn(6, 4)  # each rank's own

            def closure(x=x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return 0.0  # a loss of its own would make LBFGS's ranks decide differently

            optimizer.step(closure)
            overlap.check_replicas(model, optimizer, scaler)

    ranks(size).run(work)


def test_step_on_gradients_that_were_never_averaged(ranks):
    def work():
        overlap.init()
        model = nn.Linear(2, 1)
        attached = overlap.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with attached.no_sync():
            (model(torch.ones(2)) * (overlap.rank() + 1)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        optimizer.zero_grad()
        with pytest.raises(overlap.MismatchError, match=r"parameter 'weight' differs .*no_sync at step"):
            overlap.check_replicas(model, optimizer)

    ranks(2).run(work)


class Odd(nn.Module):
    """One parameter of each unusual kind."""

    def __init__(self):
        super().__init__()
        values = {
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(2.0),
            "transposed": torch.arange(6.0).view(2, 3).t(),
            "strided": torch.arange(8.0)[::2],
            "expanded": torch.ones(1).expand(4),
            "bf16": torch.arange(3.0, dtype=torch.bfloat16),
            "complex": torch.tensor([1 + 2j, 3 - 1j]).conj(),
            "negated": torch.tensor([1 + 2j]).conj().imag,
            "nan": torch.tensor([float("nan"), float("inf")]),
            "integer": torch.arange(3),
            "boolean": torch.tensor([True, False]),
        }
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))


def test_unusual_parameters(ranks):
    def work():
        overlap.init()
        model, found = Odd(), {}
        overlap.check_replicas(model)
        for name, parameter in model.named_parameters():
            changed = copy.deepcopy(model)
            if overlap.rank() == 1 and parameter.numel():
                changed.get_parameter(name).data = torch.zeros_like(parameter)
            try:
                overlap.check_replicas(changed)
            except overlap.MismatchError as error:
                found[name] = str(error)
        return found

    first, second = ranks(2).run(work)
    assert first == second
    assert list(first) == [name for name, _ in Odd().named_parameters() if name != "empty"]
    assert first.pop("scalar").startswith(
        "parameter 'scalar' is tensor(2.0, float32) on rank 0 but tensor(0.0"
    )
    for name, message in first.items():
        assert message.startswith(f"parameter '{name}' differs between rank 0 and rank 1 (drifted apart): ")


def test_memory_layout_and_order_of_options_do_not_matter(ranks):
    def work():
        overlap.init()
        torch.manual_seed(0)
        model = nn.Conv2d(2, 3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.param_groups[0]["on_step"] = lambda: None  # its repr is an address
        if overlap.rank() == 1:
            model.to(memory_format=torch.channels_last)
            (group,) = optimizer.param_groups
            group["lr"] = group.pop("lr")
        overlap.check_replicas(model, optimizer)

    ranks(2).run(work)


def test_buffers_are_each_ranks_own(ranks):
    def work():
        overlap.init()
        model = nn.BatchNorm1d(2)
        model.running_mean += overlap.rank()
        overlap.check_replicas(model)

    ranks(2).run(work)


def test_state_of_parameters_outside_the_model(ranks):
    def work():
        overlap.init()
        outside = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([outside], 0.1, momentum=0.9)
        outside.grad = torch.full((2,), float(overlap.rank()))
        optimizer.step()
        with pytest.raises(overlap.MismatchError) as caught:
            overlap.check_replicas(nn.ReLU(), optimizer)
        return str(caught.value)

    for message in ranks(2).run(work):
        assert message.startswith(
            "optimizer state momentum_buffer of parameter 0 of optimizer group 0 differs "
        )


def bad_arguments():
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    return [
        ((3,), "model must be a torch.nn.Module, not int"),
        ((optimizer, layer), "model must be a torch.nn.Module, not SGD"),
        ((layer, [optimizer]), "optimizer must be a torch.optim.Optimizer or None, not list"),
        (
            (layer, torch.amp.GradScaler("cpu")),
            "optimizer must be a torch.optim.Optimizer or None, not GradScaler",
        ),
        ((layer, optimizer, 2.0), "scaler must be a torch.amp.GradScaler or None, not float"),
    ]


@pytest.mark.parametrize(("arguments", "text"), bad_arguments())
def test_bad_arguments(arguments, text):
    with pytest.raises(TypeError, match=text):
        overlap.check_replicas(*arguments)
    assert not overlap.is_initialized()


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: nn.LazyLinear(3), "parameter 'weight' has no shape yet: run one batch"),
        (lambda: nn.Linear(1, 1, device="meta"), "parameter 'weight' is on meta, without values"),
    ],
)
def test_parameters_without_values(ranks, build, text):
    def work():
        overlap.init()
        with pytest.raises(ValueError) as caught:
            overlap.check_replicas(build())
        overlap.check_replicas(nn.ReLU())
        return str(caught.value)

    for message in ranks(2).run(work):
        assert message.startswith(text)


def test_world_of_one_does_nothing(ranks):
    ranks(1).run(lambda: Replica().check())
