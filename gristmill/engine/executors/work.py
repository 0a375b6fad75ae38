"""Work: what a session does, by which a process knows whether it may help, or has other options than it should."""

from collections.abc import Iterable, Sequence

import msgspec

from gristmill.engine.options import words_of_work


class Work(msgspec.Struct, frozen=True):
    """What is written, and with which options: sessions of equal work write the same bytes from the same input."""

    part: str = ""
    options: tuple[str, ...] = ()

    @classmethod
    def of_command(cls, part: str, words: Sequence[str], folders: Iterable[str]) -> "Work":
        """The work of a command line on some folders. The order and the spelling of its options do not matter.

        >>> Work.of_command("filter", ["x.py", "in", "--a", "1", "--workers", "3", "--b-c=2"], ["in"]).options
        ('--a 1', '--b_c 2', 'in', 'on in')
        """
        options = list[str]()
        for word in words_of_work(words[1:]):
            name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
            if name:
                options.append(f"--{name[2:].replace('-', '_')}" + f" {value}" * bool(equals))
            elif options and options[-1].startswith("--"):
                options[-1] += f" {value}"
            else:
                options.append(value)
        return cls(part, tuple(sorted([*options, *(f"on {folder}" for folder in folders)])))

    def differences(self, other: "Work") -> str:
        """The options in which another work differs: what is theirs instead of ours."""
        ours, theirs = sorted(set(self.options) - set(other.options)), sorted(set(other.options) - set(self.options))
        return f"{', '.join(theirs) or 'without'} instead of {', '.join(ours) or 'none'}"
