"""`overlap.torch`'s operations: Horovod's names, results, gradients and errors, on two to four ranks."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

import overlap.torch as hvd

NAMES = [
    "Compression", "allgather_object", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "allreduce", "allreduce_async", "allreduce_", "allreduce_async_",
    "grouped_allreduce", "grouped_allreduce_async", "grouped_allreduce_",
    "grouped_allreduce_async_", "sparse_allreduce_async", "allgather", "allgather_async",
    "grouped_allgather", "grouped_allgather_async", "broadcast", "broadcast_async", "broadcast_",
    "broadcast_async_", "alltoall", "alltoall_async", "reducescatter", "reducescatter_async",
    "grouped_reducescatter", "grouped_reducescatter_async", "join", "barrier", "poll",
    "synchronize", "init", "shutdown", "is_initialized", "start_timeline", "stop_timeline", "size",
    "local_size", "cross_size", "rank", "local_rank", "cross_rank", "mpi_threads_supported",
    "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built", "ddl_built",
    "ccl_built", "cuda_built", "rocm_built", "ProcessSet", "global_process_set", "add_process_set",
    "remove_process_set", "Average", "Sum", "Adasum", "Min", "Max", "Product",
    "HorovodInternalError", "SyncBatchNorm", "_check_has_gpu", "_MPI_LIB_AVAILABLE",
]  # fmt: skip


def failure(call, *args, **kwargs):
    """What a call raises: the type's name, and the text."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("name", NAMES)
def test_name_is_there(name):
    assert hasattr(hvd, name)


def test_ops_are_horovods_numbers():
    ops = hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product
    assert ops == (0, 1, 2, 3, 4, 5)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)


def test_before_init_ranks_are_a_value_error():
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size):
        with pytest.raises(ValueError, match="not initialized"):
            call()


def test_before_init_operations_are_an_internal_error():
    with pytest.raises(hvd.HorovodInternalError, match="not initialized"):
        hvd.allreduce(torch.ones(1))


def allreduces():
    hvd.init()
    x = torch.tensor([1.0, 2.0, 4.0]) * (hvd.rank() + 1)
    results = [hvd.allreduce(x, op=op).tolist() for op in (0, 1, 3, 4, 5)]
    scaled = hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5).tolist()
    handle = hvd.allreduce_async(x, name="async", op=hvd.Sum)
    waited = hvd.synchronize(handle)
    return results, scaled, waited.tolist(), hvd.synchronize(handle), failure(hvd.poll, handle)[0], x.tolist()


def test_allreduce_and_handles(pools):
    for rank, (results, scaled, waited, again, polled, x) in enumerate(pools(2).run(allreduces)):
        assert results == [[1.5, 3, 6], [3, 6, 12], [1, 2, 4], [2, 4, 8], [2, 8, 32]]
        assert scaled == waited == [3, 6, 12]
        assert again is None and polled == "ValueError"
        assert x == [1.0 + rank, 2.0 * (rank + 1), 4.0 * (rank + 1)]


def in_place():
    hvd.init()
    rank = hvd.rank()
    x = torch.full((2, 3), rank + 1.0)
    same = hvd.allreduce_(x, op=hvd.Sum) is x
    strided = torch.zeros(4, 6)
    part = strided.t()[1:4, ::2]
    part.fill_(rank)
    hvd.allreduce_(part, op=hvd.Sum)
    group = [torch.ones(2) * rank, torch.ones(3, dtype=torch.int64)]
    handle = hvd.grouped_allreduce_async_(group, op=hvd.Sum)
    result = hvd.synchronize(handle)
    root = hvd.broadcast_(torch.full((3,), rank), 1)
    return (
        (same, x.tolist()),
        (part.unique().tolist(), strided.sum().item()),
        (
            type(result),
            [a is b for a, b in zip(result, group, strict=True)],
            group[0].tolist(),
            group[1].tolist(),
        ),
        root.tolist(),
    )


def test_in_place_forms_also_of_strided_tensors(pools):
    for plain, strided, group, root in pools(2).run(in_place):
        assert plain == (True, [[3.0] * 3] * 2)
        assert strided == ([1.0], 6.0)
        assert group == (tuple, [True, True], [1.0, 1.0], [2, 2, 2])
        assert root == [1, 1, 1]


def saved_for_backward():
    hvd.init()
    w = torch.ones(2, requires_grad=True)
    x = torch.ones(2)
    y = (w * x).sum()
    hvd.allreduce_(x, op=hvd.Sum)
    return failure(y.backward)


def test_a_backward_that_needs_overwritten_values_fails(pools):
    for error in pools(2).run(saved_for_backward):
        assert error is not None and "modified by an inplace operation" in error[1]


def grouped():
    hvd.init()
    rank = hvd.rank()
    xs = [torch.ones(2) * rank, torch.ones(3, dtype=torch.float64)]
    summed = hvd.grouped_allreduce(xs, op=hvd.Sum)
    gathered = hvd.grouped_allgather([torch.full((rank + 1,), rank), torch.ones(1, 2)])
    scattered = hvd.grouped_reducescatter([torch.arange(3.0), torch.ones(2, 2)], op=hvd.Sum)
    kinds = type(summed), type(gathered), type(scattered)
    empty = hvd.grouped_allreduce([]), hvd.grouped_allgather([]), hvd.grouped_reducescatter([])
    values = [[each.tolist() for each in some] for some in (summed, gathered, scattered)]
    return kinds, values, [list(each) for each in empty], [each.dtype for each in summed]


def test_grouped_forms(pools):
    for rank, (kinds, values, empty, dtypes) in enumerate(pools(2).run(grouped)):
        assert kinds == (list, tuple, list)
        assert values[0] == [[1.0, 1.0], [2.0, 2.0, 2.0]]
        assert values[1] == [[0, 1, 1], [[1.0, 1.0], [1.0, 1.0]]]
        assert values[2] == [[[0.0, 2.0], [4.0]][rank], [[2.0, 2.0]]]
        assert empty == [[], [], []]
        assert dtypes == [torch.float32, torch.float64]


def by_rows():
    hvd.init()
    rank = hvd.rank()
    gathered = hvd.allgather(torch.full((rank, 1), rank)).tolist()  # C082: 0, 1, 2 rows
    equal = hvd.alltoall(torch.arange(3) + 10 * rank).tolist()
    splits = [[0, 1, 2], [1, 1, 1], [2, 0, 0]][rank]
    received, counts = hvd.alltoall(torch.arange(3) + 10 * rank, splits)
    longs = torch.tensor(splits, dtype=torch.int64)
    again = hvd.synchronize(hvd.alltoall_async(torch.arange(3) + 10 * rank, longs))
    scattered = hvd.reducescatter(torch.arange(5.0) * (rank + 1), op=hvd.Sum).tolist()
    return gathered, equal, received.tolist(), (counts.tolist(), counts.dtype), again[0].tolist(), scattered


def test_c082_rows_that_differ_between_ranks(pools):
    for rank, result in enumerate(pools(3).run(by_rows)):
        gathered, equal, received, counts, again, scattered = result
        assert gathered == [[1], [2], [2]]
        assert equal == [rank, 10 + rank, 20 + rank]
        assert received == again == [[10, 20, 21], [0, 11], [1, 2, 12]][rank]
        assert counts == ([[0, 1, 2], [1, 1, 0], [2, 1, 0]][rank], torch.int32)
        assert scattered == [[0.0, 6.0], [12.0, 18.0], [24.0]][rank]


DTYPES = (
    "float64 float32 float16 bfloat16 complex64 complex128 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
)


def all_dtypes():
    hvd.init()
    results = {}
    for name in DTYPES.split():
        x = torch.tensor([1, 2, 3]).to(getattr(torch, name))
        outcomes = [
            hvd.allreduce(x, op=hvd.Sum),
            hvd.allgather(x[hvd.rank() :]),
            hvd.broadcast(x, 1),
            hvd.alltoall(x[:2]),
            hvd.reducescatter(x, op=hvd.Sum),
        ]
        results[name] = (
            [str(each.dtype) for each in outcomes],
            [each.to(torch.complex128).real.tolist() for each in outcomes],
        )
    bools = torch.tensor([True, False]), torch.tensor([hvd.rank() == 0, False])
    results["bool"] = (
        [hvd.allreduce(bools[1], op=op).tolist() for op in (hvd.Min, hvd.Max)],
        hvd.allgather(bools[0]).tolist(),
    )
    return results


def test_every_dtype_keeps_its_type(pools):
    for rank, results in enumerate(pools(2).run(all_dtypes)):
        assert results.pop("bool") == ([[False, False], [True, False]], [True, False, True, False])
        scattered = [[2, 4], [6]][rank]
        for name, (dtypes, values) in results.items():
            assert dtypes == [f"torch.{name}"] * 5
            assert values == [[2, 4, 6], [1, 2, 3, 2, 3], [1, 2, 3], [rank + 1] * 2, scattered], name


def halves():
    hvd.init()
    rank = hvd.rank()
    sixteen = hvd.allreduce(torch.full((5,), 30000.0, dtype=torch.float16)).tolist()
    orders = [[256, 1, 1, 0], [0, 1, 256, 1], [1, 1, 0, 256]]
    sums = [
        hvd.allreduce(torch.tensor([values[rank]], dtype=torch.bfloat16), op=hvd.Sum).item()
        for values in orders
    ]
    return sixteen, sums


def test_c023_c025_halves_neither_overflow_nor_depend_on_the_order(pools):
    assert pools(4).run(halves) == [([30000.0] * 5, [258.0] * 3)] * 4


def tie():
    hvd.init()
    return hvd.allreduce(torch.tensor([[1.0, 1.0078125][hvd.rank()]], dtype=torch.bfloat16)).item()


def test_c025_a_tie_goes_to_even(pools):
    assert pools(2).run(tie) == [1.0, 1.0]


def whole_averages():
    hvd.init()
    rank = hvd.rank()
    return hvd.allreduce(torch.tensor([3 + rank, -3 - rank], dtype=torch.int32)).tolist()


def test_c026_an_average_of_integers_is_truncated(pools):
    assert pools(2).run(whole_averages) == [[3, -3]] * 2


def names_in_flight():
    hvd.init()
    x = torch.tensor([hvd.rank() + 1.0])
    hvd.barrier()
    if hvd.rank():
        hvd.barrier()  # so that the first is in flight on rank 0
    first = hvd.allreduce_async(x, name="x")
    # On rank 1 it may have run at once.
    error = failure(hvd.allreduce_async, x, name="x") if hvd.rank() == 0 else None
    if hvd.rank() == 0:
        hvd.barrier()
    return error, hvd.synchronize(first).item(), hvd.allreduce(x, name="x").item()


def test_c043_a_name_in_flight_is_refused_and_free_afterwards(pools):
    zero, one = pools(2).run(names_in_flight)
    assert zero[0][0] == "ValueError" and "x" in zero[0][1]
    assert zero[1:] == one[1:] == (1.5, 1.5)


def gradients():
    hvd.init()
    rank = hvd.rank()

    def gradient(operation, weight=None, rows=2):
        x = torch.ones(rows, 2, requires_grad=True)
        y = operation(x)
        y = y[0] if isinstance(y, tuple) else y
        ((rank + 1) * y.sum()).backward()
        return x.grad[:, 0].tolist()

    return [
        gradient(hvd.allgather),
        gradient(lambda x: hvd.broadcast(x, 0)),
        gradient(hvd.allreduce),
        gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0)),
        gradient(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16)),
        gradient(lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[1]),
        gradient(lambda x: hvd.alltoall(x)),
        gradient(lambda x: hvd.alltoall(x, [1, 0])),
        gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum)),
        gradient(hvd.reducescatter),
        gradient(lambda x: hvd.grouped_reducescatter([x])[0]),
        gradient(lambda x: hvd.grouped_allgather([x[: rank + 1]])[0]),
        [
            failure(gradient, lambda x, op=op: hvd.allreduce(x, op=op))[0]
            for op in (hvd.Min, hvd.Max, hvd.Product)
        ],
    ]


def test_c083_gradients(pools):
    for rank, result in enumerate(pools(2).run(gradients)):
        (
            gathered,
            sent,
            average,
            summed,
            halved,
            group,
            turned,
            part,
            scattered,
            mean,
            means,
            ragged,
            refused,
        ) = result
        assert gathered == [1.5, 1.5]
        assert sent == [[1.5, 1.5], [0.0, 0.0]][rank]
        assert average == halved == [1.5, 1.5]
        assert summed == [6.0, 6.0] and group == [3.0, 3.0]
        assert turned == [1.0, 2.0] and part == [1.0, 0.0]
        assert scattered == [2.0, 4.0]
        assert mean == means == [1.0, 2.0]
        assert ragged == [[1.5, 0.0], [1.5, 1.5]][rank]
        assert refused == ["RuntimeError"] * 3


def local_errors():
    hvd.init()
    x = torch.ones(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deprecated = hvd.allreduce(x, average=False).tolist()
    return (
        [
            failure(hvd.allreduce, x, average=True, op=hvd.Sum),
            failure(hvd.allreduce, x, op=17),
            failure(hvd.allreduce, x.to(torch.float8_e5m2)),
            failure(hvd.allreduce, torch.ones(2, dtype=torch.bool)),
            failure(hvd.allreduce, torch.ones(2, dtype=torch.int32), op=hvd.Adasum),
            failure(hvd.allreduce, torch.ones(2, dtype=torch.complex64), op=hvd.Max),
            failure(hvd.allreduce, torch.ones(2, device="meta")),
            failure(hvd.allreduce, x.to_sparse()),
            failure(hvd.allgather, torch.tensor(1.0)),
            failure(hvd.reducescatter, torch.tensor(1.0)),
            failure(hvd.alltoall, torch.tensor(1.0)),
            failure(hvd.alltoall, x),
            failure(hvd.alltoall, x, [[1, 1]]),
            failure(hvd.alltoall, x, [1, 1, 1]),
            failure(hvd.alltoall, x, [2, 2]),
            failure(hvd.alltoall, x, torch.tensor([1.0, 1.0])),
            failure(hvd.broadcast, x, 2),
            failure(hvd.sparse_allreduce_async, x, "dense", hvd.Sum),
            failure(hvd.broadcast_parameters, 3, 0),
        ],
        deprecated,
        [each.category.__name__ for each in caught],
    )


def test_bad_arguments_are_value_errors_and_nothing_was_sent(pools):
    for errors, deprecated, caught in pools(2).run(local_errors):
        assert [each and each[0] for each in errors] == ["ValueError"] * len(errors)
        assert deprecated == [2.0] * 3
        assert caught == ["DeprecationWarning"]


def mismatches():
    hvd.init()
    rank = hvd.rank()
    x = torch.ones(2 + rank)
    errors = [
        failure(hvd.allreduce, x, name="shape"),
        failure(hvd.allreduce, torch.ones(2).to([torch.float32, torch.float64][rank]), name="dtype"),
        failure(hvd.allreduce, torch.ones(2), name="op", op=[hvd.Sum, hvd.Average][rank]),
        failure(hvd.allreduce, torch.ones(2), name="scale", op=hvd.Sum, prescale_factor=1.0 + rank),
        failure(hvd.allgather, torch.ones(2, 2 + rank), name="trailing"),
        failure(hvd.broadcast, torch.ones(2), rank, name="root"),
        failure(hvd.alltoall, torch.ones(2, 2 + rank), name="rows"),
        failure(hvd.reducescatter, x, name="scatter"),
    ]
    kinds = [isinstance(overlap_error(), RuntimeError)]
    return errors, kinds, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def overlap_error():
    return hvd.HorovodInternalError("x")


def test_mismatches_are_one_error_on_all_ranks(pools):
    zero, one = pools(2).run(mismatches)
    assert zero == one
    assert {each[0] for each in zero[0]} == {"MismatchError"}
    assert zero[2] == 2.0


def joins():
    hvd.init()
    rank = hvd.rank()
    sums = [hvd.allreduce(torch.ones(1), op=hvd.Sum).item() for _ in range(1 + rank)]
    refused = failure(hvd.allgather, torch.ones(1), name="late") if rank else None
    last = hvd.join()
    return sums, refused, last, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def test_join(pools):
    zero, one = pools(2).run(joins)
    assert zero == ([2.0], None, 1, 2.0)
    assert one[0] == [2.0, 1.0] and one[2:] == (1, 2.0)
    assert one[1] is not None and one[1][0] in ("CommError", "MismatchError")


def sparse():
    hvd.init()
    rank = hvd.rank()
    x = torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (4,), check_invariants=False)
    return [hvd.sparse_allreduce_async(x, "s", op=op)().to_dense().tolist() for op in (hvd.Sum, hvd.Average)]


def test_sparse_allreduce(pools):
    for result in pools(2).run(sparse):
        assert result == [[1.0, 1.0, 4.0, 0.0], [0.5, 0.5, 2.0, 0.0]]


def adasum():
    hvd.init()
    rank = hvd.rank()
    orthogonal = torch.tensor([[1.0, 0.0], [0.0, 1.0]][rank])
    return hvd.allreduce(orthogonal, op=hvd.Adasum).tolist(), hvd.allreduce(
        torch.ones(2), op=hvd.Adasum
    ).tolist()


def test_adasum_sums_orthogonal_and_averages_parallel(pools):
    assert pools(2).run(adasum) == [([1.0, 1.0], [1.0, 1.0])] * 2


def process_sets():
    hvd.init()
    rank = hvd.rank()
    x = torch.tensor([rank + 1.0])
    outer = hvd.add_process_set([0, 2])
    inside = hvd.allreduce(x, op=hvd.Sum, process_set=outer).item() if outer.included() else None
    root = hvd.broadcast(x, 2, process_set=outer).item() if outer.included() else None
    objects = hvd.allgather_object(rank, process_set=outer) if outer.included() else None
    place = outer.rank() if outer.included() else failure(outer.rank)[0]
    refused = None if outer.included() else failure(hvd.allreduce, x, process_set=outer)[0]
    assert hvd.allreduce(x, op=hvd.Sum).item() == 6.0  # unnamed, after unnamed ones among fewer ranks
    twice = failure(hvd.add_process_set, [2, 0])[0]
    size = outer.size()
    removed = (
        hvd.remove_process_set(outer),
        hvd.remove_process_set(outer),
        hvd.remove_process_set(hvd.global_process_set),
    )
    gone = failure(hvd.allreduce, x, process_set=outer)[0]
    return (
        inside,
        root,
        objects,
        place,
        refused,
        twice,
        size,
        removed,
        gone,
        outer.process_set_id,
        hvd.global_process_set.ranks,
    )


def test_process_sets(pools):
    for rank, result in enumerate(pools(3).run(process_sets)):
        inside, root, objects, place, refused, *rest = result
        if rank == 1:
            assert (inside, root, objects, place, refused) == (None, None, None, "ValueError", "ValueError")
        else:
            assert (inside, root, objects, place, refused) == (4.0, 3.0, [0, 2], rank // 2, None)
        assert rest == ["ValueError", 2, (True, False, False), "ValueError", None, [0, 1, 2]]


def inits():
    for _ in range(3):
        hvd.init()
        hvd.shutdown()
    both = hvd.ProcessSet([0, 1])
    refused = failure(hvd.init, process_sets=[both])
    hvd.shutdown()
    single = hvd.ProcessSet([1])
    hvd.init(process_sets=[single])
    first = single.process_set_id
    hvd.init(process_sets=[single])
    again = single.process_set_id, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    hvd.shutdown()
    down = single.process_set_id, failure(hvd.size)[0]
    hvd.init()
    return refused and refused[0], first == again[0], again[1], down


def test_init_shutdown_and_static_process_sets(pools):
    assert pools(2).run(inits) == [("ValueError", True, 2.0, (None, "ValueError"))] * 2


def test_what_is_built_and_the_timeline():
    assert not (
        hvd.mpi_built() or hvd.mpi_enabled() or hvd.cuda_built() or hvd.rocm_built() or hvd.nccl_built()
    )
    assert not (hvd.ccl_built() or hvd.ddl_built())
    with pytest.raises(ValueError, match="timeline"):
        hvd.start_timeline("x.json")


def test_compression():
    for compressor, wire in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        sent, context = compressor.compress(torch.ones(2, dtype=torch.float64))
        assert sent.dtype is wire and compressor.decompress(sent, context).dtype is torch.float64
        whole = torch.ones(2, dtype=torch.int32)
        sent, context = compressor.compress(whole)
        assert compressor.decompress(sent, context) is whole
