"""Rotary position embeddings (Su et al., 2021) that a cast of the model leaves exact."""


class ExactFrequencies:
    """For Hugging Face's rotary embeddings: their frequencies stay in float32 when the model is
    cast.

    In bfloat16 a frequency has three digits, and after some hundred positions the angle is another.
    """

    def _apply(self, fn, recurse: bool = True):
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            if self._buffers[name].dtype is not tensor.dtype:
                self._buffers[name] = tensor.to(self._buffers[name].device)
        return self
