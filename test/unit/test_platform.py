"""What the CPU platform does for tensor-parallel ranks."""

import pytest

from granikv_sglang.plugin.platform import prepare_tensor_parallel


@pytest.mark.parametrize(
    ("ranks", "cores", "wanted"),
    [(2, [0, 1], "0|1"), (2, [0, 1, 2, 5, 6], "0,1|2,5,6"), (4, [3, 4], "3|3|4|4"), (4, [7], "7|7|7|7")],
)
def test_every_rank_gets_cores(ranks, cores, wanted):
    env: dict[str, str] = {}
    prepare_tensor_parallel(env, ranks, cores)
    bound = env["SGLANG_CPU_OMP_THREADS_BIND"]
    assert len(bound.split("|")) == ranks
    assert all(part and {int(core) for core in part.split(",")} <= set(cores) for part in bound.split("|"))
    if len(cores) >= ranks:
        assert bound == wanted
    assert env["SGLANG_NCCL_SO_PATH"].startswith("/nonexistent")


def test_what_the_user_set_stays():
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0-3|4-7", "SGLANG_NCCL_SO_PATH": "/opt/nccl.so"}
    before = dict(env)
    prepare_tensor_parallel(env, 2, [0, 1])
    assert env == before
