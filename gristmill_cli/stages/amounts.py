"""Whether the mix has as much of a source as was asked for."""

from collections.abc import Iterator

from gristmill_cli.run_config import RunConfig


def differing_amount(config: RunConfig, source: str, asked: float, got: int, unit: str) -> Iterator[str]:
    """Yield a sentence if the amount of a source differs from what was asked for by more than --alarms.mix."""
    limit = config.alarms.mix
    if limit and abs(got - asked) > limit * max(asked, 1):
        yield (
            f"the mix has {got:,} {unit} of {source}, and {asked:,.0f} were asked for: look at the shares of the mix "
            "in gristmill report OUT"
        )
