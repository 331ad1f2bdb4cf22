"""For each notebook: the parameters that `test_notebooks` tries, and the mistakes that its exercises' checks have to see."""

PARAMETER_SETS = {
    "00_meet_the_mesh": [
        {"world_size": 2, "tp_size": 1},
        {"world_size": 4, "tp_size": 4, "mebibytes": 1},
        {"world_size": 3, "tp_size": 3, "timeout": 5},
    ],
}

# The parameters, and the numbers that the error has to name.
BAD_PARAMETERS = {
    "00_meet_the_mesh": [
        ({"tp_size": 3}, [4, 3]),
        ({"world_size": 1, "tp_size": 1}, [1, 2]),
        ({"backend": "tpu"}, ["'tpu'", "cpu"]),
    ],
}

# With which the exercises are checked: as little as will do.
QUICK = {
    "00_meet_the_mesh": {"mebibytes": 1, "timeout": 5},
}

# One run for each entry: what somebody wrote into the exercises' cells, and what the checks should say to it.
MISTAKES = {
    "00_meet_the_mesh": [
        {
            "group": ("group_of_rank_5 = [4, 5, 6, 7]", "shape (4,) instead of (2,), because that is its tensor-parallel"),
            "reduce_scatter": (
                '%%px\nanswer = comm.all_reduce("sum", torch.arange(2 * world_size) + rank, everyone)',
                "shape (8,) instead of (2,) on rank 0, because it is the whole sum",
            ),
            "scale": ("gigabytes = 14", "off by 13.125, because that is what it holds"),
        },
        {
            "group": ("group_of_rank_5 = [1, 6]", "off by 1"),
            "reduce_scatter": (
                '%%px\nanswer = comm.all_reduce("sum", torch.arange(2 * world_size) + rank, everyone)[:2]',
                "off by 8 on rank 1, because every rank kept the first piece",
            ),
            "scale": ("gigabytes = 31 * 14", "because that is every rank sending"),
        },
    ],
}
