"""For each notebook: parameters that are tried, good and bad."""

PARAMETER_SETS = {
    "00_meet_the_mesh": [
        {"world_size": 2, "tp_size": 1},
        {"world_size": 3, "tp_size": 3, "timeout": 5},
    ],
    "01_developer_guide": [
        {"tp_size": 4, "steps": 4},
        {"world_size": 2, "tp_size": 1, "steps": 4, "batch_size": 2, "seed": 1},
    ],
    "02_bert_tensor_parallel": [
        {"world_size": 2, "tp_size": 2, "steps": 8, "shard_mlp": False, "shard_vocabulary": False},
        {"world_size": 4, "tp_size": 4, "steps": 40},
    ],
    "03_gpt_neox_sequence_parallel": [
        {"preset": "small", "steps": 4, "batch_size": 2},
        {"world_size": 4, "tp_size": 4, "steps": 4, "batch_size": 2},
    ],
    "04_llama2_selective_checkpointing": [
        {"world_size": 4, "tp_size": 4, "kv_heads": 2, "checkpointing": "full", "steps": 3},
        {
            "world_size": 2,
            "tp_size": 2,
            "checkpointing": "selective+mlp",
            "sequence_parallel": False,
            "steps": 3,
        },
    ],
    "05_megatron_gpt_pretraining": [
        {"backend": "xla", "world_size": 2, "tp_size": 2, "steps": 6, "global_batch_size": 8},
        {"tp_size": 1, "steps": 6, "dropout": 0.0, "sequence_parallel": False},
    ],
    "06_checkpoints": [
        {"kv_heads": 4, "use_xser": True, "steps": 7, "seq_length": 32, "seed": 1},
        {"world_size": 2, "tp_size": 2, "kv_heads": 1, "steps": 4, "batch_size": 1},
    ],
    "07_plan_a_real_run": [
        {"world_size": 2, "tp_size": 2, "model": "gpt-neox-20b", "instance": "h100x8"},
        {"world_size": 4, "tp_size": 4, "batch_size": 1, "seq_length": 64},
    ],
    "08_bug_hunt": [
        {"world_size": 6, "tp_size": 2, "steps": 3, "seed": 1},
        {"world_size": 8, "tp_size": 4},
    ],
    "09_pytorchs_own": [
        {"world_size": 4, "tp_size": 4, "steps": 2, "batch_size": 1, "micro_batches": 2},
        {"preset": "small", "steps": 2, "seq_length": 64, "micro_batches": 6, "seed": 1},
    ],
}

# With which the exercises are checked: as little as will do.
QUICK = {
    "00_meet_the_mesh": {"mebibytes": 1, "timeout": 5},
    "01_developer_guide": {"world_size": 2, "steps": 2},
    "02_bert_tensor_parallel": {"world_size": 2, "steps": 4, "global_batch_size": 8},
    "03_gpt_neox_sequence_parallel": {"world_size": 2, "steps": 4, "batch_size": 2},
    "04_llama2_selective_checkpointing": {"steps": 6},  # of fewer the loss need not fall
    "05_megatron_gpt_pretraining": {"world_size": 2, "steps": 6, "global_batch_size": 8},
    "06_checkpoints": {"world_size": 2, "tp_size": 2, "steps": 2, "batch_size": 1},
    "07_plan_a_real_run": {"world_size": 2, "batch_size": 1, "seq_length": 32},
    "08_bug_hunt": {"steps": 2, "timeout": 5},
    "09_pytorchs_own": {"world_size": 2, "steps": 2, "batch_size": 1, "micro_batches": 2},
}

# With which a notebook runs on `xla`: as little as will do, as compiling takes most of the time.
XLA_PARAMETERS = {
    "01_developer_guide": {"steps": 3},
    "02_bert_tensor_parallel": {"steps": 4},
    "03_gpt_neox_sequence_parallel": {"steps": 3, "batch_size": 2},
    "04_llama2_selective_checkpointing": {"steps": 4},
    # Without dropout, as the two backends drop other units.
    "05_megatron_gpt_pretraining": QUICK["05_megatron_gpt_pretraining"] | {"dropout": 0.0},
    "06_checkpoints": QUICK["06_checkpoints"] | {"steps": 4},
    "07_plan_a_real_run": {"world_size": 2, "tp_size": 1},
    "08_bug_hunt": {"steps": 2},
}

# The parameters, and the numbers that the error has to name. `full` has to show the dry run on a
# machine that is too small.
ON_32 = {"preset": "full", "world_size": 32, "tp_size": 8}
DRY_RUN = "Collectives of a step"
BAD_PARAMETERS = {
    "00_meet_the_mesh": [
        ({"tp_size": 3}, [4, 3]),
        ({"world_size": 1, "tp_size": 1}, [1, 2]),
        ({"backend": "tpu"}, ["'tpu'", "cpu"]),
    ],
    "01_developer_guide": [
        (ON_32, ["10,759,235,456", "bytes", 32, DRY_RUN]),
        ({"tp_size": 3}, [4, 3]),
        ({"world_size": 8, "tp_size": 8}, ["heads", 4, 8]),
        ({"preset": "huge"}, ["'huge'", "tiny"]),
    ],
    "02_bert_tensor_parallel": [
        (ON_32 | {"global_batch_size": 128}, ["5,379,617,728", "bytes", 32, DRY_RUN]),
        ({"tp_size": 3}, [4, 3]),
        ({"world_size": 8, "tp_size": 8, "global_batch_size": 64}, ["heads", 4, 8]),
        ({"global_batch_size": 20}, [20, 16]),
    ],
    "03_gpt_neox_sequence_parallel": [
        ({"preset": "full"}, ["164,449,615,872", "bytes", DRY_RUN]),
        ({"world_size": 8, "tp_size": 8}, [4, 8]),
        ({"seq_length": 33}, [33, 2]),
        ({"preset": "6.9b"}, ["bytes", "free"]),
        ({"preset": "huge"}, ["'huge'", "tiny"]),
        ({"tp_size": 1}, [1, 2]),
    ],
    "04_llama2_selective_checkpointing": [
        ({"preset": "full"}, ["53,909,454,848", "bytes", DRY_RUN]),
        ({"world_size": 2, "tp_size": 1}, [1, 2]),
        ({"world_size": 3, "tp_size": 3}, [128, 3]),
        ({"seq_length": 33}, [33, 2]),
        ({"checkpointing": "most"}, ["'most'", "selective+mlp"]),
        ({"kv_heads": 3, "tp_size": 2}, [4, 3]),
    ],
    "05_megatron_gpt_pretraining": [
        ({"preset": "full"}, ["53,346,435,072", "bytes", DRY_RUN]),
        ({"tp_size": 3}, [4, 3]),
        ({"world_size": 8, "tp_size": 8}, ["heads", 4, 8]),
        ({"global_batch_size": 20}, [20, 8]),
        ({"seq_length": 300}, [300, 256]),
        ({"steps": 3}, [3, 4]),
    ],
    "06_checkpoints": [
        ({"preset": "full"}, ["bytes", "free", DRY_RUN]),
        ({"tp_size": 3}, [4, 3]),
        ({"tp_size": 1}, [1, 2, 4]),
        ({"world_size": 8, "tp_size": 8}, ["heads", 4, 8]),
        ({"kv_heads": 3}, ["heads", 4, 3]),
        ({"steps": 1}, ["steps", 1, 2]),
    ],
    "07_plan_a_real_run": [
        (ON_32, ["bytes", 32, "842,534,912 of", DRY_RUN]),
        ({"tp_size": 3}, [4, 3]),
        ({"seq_length": 33}, [33, 2]),
        ({"model": "gpt-5"}, ["'gpt-5'", "llama2-7b"]),
        ({"instance": "p5"}, ["'p5'", "h100x8"]),
    ],
    "08_bug_hunt": [
        ({"world_size": 2}, [2, 4]),
        ({"tp_size": 3}, [4, 3]),
        ({"tp_size": 4}, [4, 4, 1, "replicas"]),
        ({"world_size": 6, "tp_size": 3}, [6, 3, 16]),
        ({"steps": 1}, ["steps", 1, 2]),
    ],
    "09_pytorchs_own": [
        ({"preset": "full"}, ["bytes", "free", DRY_RUN]),
        ({"backend": "xla"}, ["'xla'", "DTensor", "cuda"]),
        ({"world_size": 8, "tp_size": 8}, ["heads", 4, 8]),
        ({"seq_length": 33}, [33, 2]),
        ({"world_size": 2, "tp_size": 1}, [1, 2]),
        ({"micro_batches": 1}, ["micro_batches", 1, 2]),
    ],
}
