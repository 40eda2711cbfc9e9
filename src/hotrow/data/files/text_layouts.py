"""Text layouts: the columns of a delimited text file, and its default features.

A layout is a value: column names with the kind of each, the delimiter, whether the first line is a header, and the
texts that mean "missing". Three are built in: Criteo's original tab separated files without a header (Kaggle and
Terabyte), the comma separated copies with a header, and Avazu's CSV.

A kind says how text becomes a raw column: "number" is float64 (Criteo's counts come as 260 and as 260.0), "integer" is
int64, "string" is text, and "hour" is Avazu's YYMMDDHH in UTC, which becomes a timestamp. The feature spec then makes
features of the column, as in serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

from hotrow.errors import OptionError, choices
from hotrow.features import Dense, FeatureSpec, Key, TimePart

KINDS = ("number", "integer", "string", "hour")


@dataclass(frozen=True)
class TextLayout:
    """How to read a delimited text file.

    >>> layout = TextLayout({"click": "number", "user": "string"}, delimiter=";", header=False)
    >>> list(layout.columns)
    ['click', 'user']
    """

    columns: Mapping[str, str]
    delimiter: str = ","
    header: bool = True
    missing: Many[str] = ("",)
    features: FeatureSpec | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.columns, Mapping) or not self.columns:
            raise OptionError(f"columns={self.columns!r}; give a dict of column name to kind: {', '.join(KINDS)}")
        for name, kind in self.columns.items():
            if kind not in KINDS:
                raise OptionError(f"column {name!r} has the kind {kind!r}; {choices(kind, KINDS)}")
        if not isinstance(self.delimiter, str) or len(self.delimiter.encode()) != 1 or self.delimiter in "\r\n":
            raise OptionError(f"delimiter={self.delimiter!r}; give one ASCII character such as ',' or '\\t'")
        if isinstance(self.missing, str):
            raise OptionError(f"missing={self.missing!r}; give a list of texts, for example ('', 'NULL')")
        object.__setattr__(self, "columns", dict(self.columns))
        object.__setattr__(self, "missing", tuple(self.missing))

    def default_spec(self) -> FeatureSpec:
        """The features that this layout's data usually becomes.

        >>> CRITEO.default_spec().dense_names[:2]
        ('I1', 'I2')
        """
        if self.features is None:
            raise OptionError("this layout has no default features; pass features=FeatureSpec([...])")
        return self.features


def _criteo(delimiter: str, header: bool) -> TextLayout:
    """Label, 13 counts, 26 categories as 8 hex digits; any of them but the label may be missing."""
    counts = [f"I{i}" for i in range(1, 14)]
    categories = [f"C{i}" for i in range(1, 27)]
    return TextLayout(
        columns={"label": "number", **dict.fromkeys(counts, "number"), **dict.fromkeys(categories, "string")},
        delimiter=delimiter,
        header=header,
        features=FeatureSpec(
            [*(Dense(name, transform="log1p") for name in counts), *(Key(name, hash="string") for name in categories)],
            label="label",
        ),
    )


def _avazu() -> TextLayout:
    """Id, click, hour and 21 categories: nine as 8 hex digits, the rest as integers."""
    texts = [f"{owner}_{part}" for owner in ("site", "app") for part in ("id", "domain", "category")]
    texts += ["device_id", "device_ip", "device_model"]
    names = ["C1", "banner_pos", *texts, "device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22))]
    kinds = {name: "string" if name in texts else "integer" for name in names}
    hashes = {"string": "string", "integer": "none"}
    return TextLayout(
        columns={"id": "string", "click": "number", "hour": "hour", **kinds},
        features=FeatureSpec(
            [
                *(Key(name, hash=hashes[kind]) for name, kind in kinds.items()),
                TimePart("hour_of_day", "hour", "hour"),
                TimePart("day_of_week", "hour", "weekday"),
            ],
            label="click",
            time="hour",
        ),
    )


CRITEO = _criteo(",", header=True)
CRITEO_TSV = _criteo("\t", header=False)
AVAZU = _avazu()

LAYOUTS = {"criteo": CRITEO, "criteo-tsv": CRITEO_TSV, "avazu": AVAZU}


def find_layout(layout: str | TextLayout) -> TextLayout:
    """A layout by its name, or as it is."""
    if isinstance(layout, TextLayout):
        return layout
    if layout not in LAYOUTS:
        raise OptionError(f"layout={layout!r}; {choices(layout, LAYOUTS)}, or pass a TextLayout")
    return LAYOUTS[layout]
