"""What stands in for a pipeline whose velocity is known: what families may change stays as it is for a flow."""

from flowrun.pipelines import Pipeline


class FlowStub:
    conditions, ragged = (), ()
    guide, joined, is_ragged = Pipeline.guide, Pipeline.joined, Pipeline.is_ragged
    start, level, error_weight = Pipeline.start, Pipeline.level, Pipeline.error_weight
