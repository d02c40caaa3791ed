"""What stands in for a pipeline whose velocity is known: what families may change stays as it is for a flow."""

from flowrun.pipelines import Pipeline


class FlowStub:
    conditions, ragged = (), ()
    denoisers, denoiser, trained_range = ("transformer",), "transformer", (0.0, 1.0)
    guide, guidance_at, joined, is_ragged = Pipeline.guide, Pipeline.guidance_at, Pipeline.joined, Pipeline.is_ragged
    pixel_shape = Pipeline.pixel_shape
    start, level, error_weight = Pipeline.start, Pipeline.level, Pipeline.error_weight
    weigh, stream_errors = Pipeline.weigh, Pipeline.stream_errors
