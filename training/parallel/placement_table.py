"""The placement table: the piece of each parameter that a rank has, and the axes its gradient is summed over.

Derived from it: the pieces themselves, which are the boxes of checkpoints; which rank counts a piece in the gradient
norm; which sums of gradients follow the backward pass; and how many ranks must hold the same values. A parameter
without a row is an error: nothing is replicated for being forgotten.
"""

from training.model.decoder import Decoder
from training.parallel.data.placements import DATA_PARALLEL
from training.parallel.experiment import experiment_of
from training.parallel.expert.options import is_expert
from training.parallel.expert.placements import EXPERT_PARALLEL
from training.parallel.layout import Layout
from training.parallel.pipeline.placements import TIED
from training.parallel.tensor.placements import joint_norms, own_placements, tensor_parallel_table
from training.sharding.placement import Placement


def placement_table(decoder: Decoder, layout: Layout) -> dict[str, Placement]:
    """Return the placement of every parameter of the unsplit decoder, by name; a tied matrix has both its names."""
    copies = layout.kv_copies(decoder.config)
    table = experiment_of(layout).placements() or tensor_parallel_table(layout.sequence_parallel, copies)
    if decoder.config.qk_norm_joint:
        table = table | joint_norms(copies)
    tied = bool(decoder.config.tied) and layout.stages > 1
    placements = {}
    own = own_placements(decoder, layout.sequence_parallel)
    for name, _ in decoder.named_parameters(remove_duplicate=False):
        rows = [own[name]] if name in own else [row for end, row in table.items() if f".{name}".endswith(f".{end}")]
        assert len(rows) == 1, f"{name} has {len(rows)} rows in the placement table"
        twice = TIED if tied and name in ("embed.tokens.weight", "head.weight") else Placement()
        data = EXPERT_PARALLEL if is_expert(name) else DATA_PARALLEL
        placements[name] = rows[0] | data | twice
    return placements
