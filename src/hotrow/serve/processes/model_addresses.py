"""Options that give an address for a model: `--bus ctr=dir:/data`, or `--bus dir:/data` where there is one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hotrow.credentials import public
from hotrow.errors import OptionError, choices


def addresses_by_model(
    option: str, all_given: Sequence[str], names: Callable[[], list[str]], schemes: Sequence[str] | None, example: str
) -> dict[str, list[str]]:
    """The addresses of each model that has any, in the order in which they are given. An address without a model's name
    belongs to the only model. `names` lists the models; it is called if an address is given."""
    found: dict[str, list[str]] = {}
    known = names() if all_given else []
    for given in all_given:
        name, _, address = given.partition("=")
        if ":" in name or "?" in name or not address:
            name, address = "", given
        shown = f"--{option} {name + '=' if name else ''}{public(address)}"
        if not name:
            if len(known) != 1:
                raise OptionError(
                    f"{shown}: the repository has {', '.join(known) or 'no model'}; say which model follows it, "
                    f"such as --{option} ctr={example}"
                )
            name = known[0]
        elif name not in known:
            raise OptionError(f"{shown}: there is no model {name!r}; {choices(name, known)}")
        if schemes is not None and address.partition(":")[0] not in schemes:
            raise OptionError(f"{shown}: {choices(address.partition(':')[0], schemes)}, such as {example}")
        found.setdefault(name, []).append(address)
    return found


def address_by_model(
    option: str, all_given: Sequence[str], names: Callable[[], list[str]], schemes: Sequence[str] | None, example: str
) -> dict[str, str]:
    """As `addresses_by_model`, for an option that a model has once."""
    found = addresses_by_model(option, all_given, names, schemes, example)
    for name, addresses in found.items():
        if len(addresses) > 1:
            verb = "follows" if option == "bus" else "has"
            raise OptionError(
                f"--{option} {name}={public(addresses[1])}: model {name!r} {verb} {public(addresses[0])} already"
            )
    return {name: address for name, (address,) in found.items()}
