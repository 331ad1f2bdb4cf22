"""FLOPs of one rank's matrix multiplications, two for each multiply and add, in closed form."""

from tutorial_lib.lab.plan.runs import Run

from .activations import rate
from .parameters import qkv_features, vocabulary


def layer_operations(run: Run) -> tuple[int, int, int]:
    """Of one layer's forward pass over a micro-batch.

    Returns:
        The whole; of it query times key (as much as probabilities times value); and the last
        multiplication.
    """
    tokens, features = run.tokens, run.features
    hidden, (queries, keys) = run.config.hidden_size, qkv_features(run)
    scores = 2 * tokens * run.sequence * queries
    matrices = hidden * (queries + 2 * keys) + queries * hidden
    matrices += (3 if run.family == "llama" else 2) * hidden * features
    return 2 * tokens * matrices + 2 * scores, scores, 2 * tokens * hidden * features


def end_operations(run: Run) -> int:
    """Of what lies around the layers, forward."""
    hidden, tokens = run.config.hidden_size, run.tokens
    head = 2 * tokens * min(vocabulary(run), run.config.vocab_size) * hidden
    if run.family != "bert":
        return head
    return head + 2 * tokens * hidden**2 + 2 * run.micro_batch * hidden * (hidden + 2)


def operations(run: Run) -> int:
    """Of a step. Backward takes twice what forward takes, and what is checkpointed runs forward
    again.
    """
    layer, scores, last = layer_operations(run)
    again = 0
    if run.checkpointing == "full":
        # Recomputation stops at the last thing that backward needs: without tensor parallelism,
        # norm or dropout behind it the last multiplication is spared.
        dropout = rate(run, "resid_pdrop", "hidden_dropout")
        spared = run.tp == 1 and run.family != "bert" and not dropout
        again = layer - (last if spared else 0)
    elif run.checkpointing != "none":
        again = scores
    forward = run.config.num_hidden_layers * layer + end_operations(run)
    return run.accumulation * (3 * forward + run.config.num_hidden_layers * again)


def useful_operations_a_sequence(run: Run) -> float:
    """What the model itself takes for a sequence, over all ranks, nothing computed twice (Chowdhery
    et al., 2022).
    """
    whole = run.change(
        tp=1, dp=1, micro_batch=1, accumulation=1, checkpointing="none", sequence_parallel=False
    )
    return operations(whole)
