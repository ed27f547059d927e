"""Decides which installed packages may be used for training: those whose metadata names permissive licences only.

License-Expression (PEP 639, SPDX) decides, or else the licence classifiers. An expression is accepted only if every licence in it is
permissive, even if they are joined by OR.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageMetadata

PERMISSIVE = {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "HPND", "ISC", "LLVM-exception"}
PERMISSIVE |= {"MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib"}
CLASSIFIERS: Mapping[str, str] = {  # end of "License :: OSI Approved :: ..." -> SPDX name, or a plain word if the classifier is ambiguous
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "Zero-Clause BSD (0BSD)": "0BSD",
    "zlib/libpng License": "Zlib",
}


@dataclass(frozen=True, kw_only=True)
class Licence:
    """The licence in a package's metadata: its SPDX name if it is known, else the text of the metadata."""

    name: str
    field: str  # the metadata field it was read from; "" if all are empty
    permissive: bool


def licence_of(metadata: PackageMetadata) -> Licence:
    """Return the licence that the metadata of an installed distribution (`importlib.metadata`) states."""
    if expression := (metadata.get_all("License-Expression") or [""])[0]:
        named = set(re.findall(r"[A-Za-z0-9.+-]+", expression)) - {"AND", "OR", "WITH"}
        return Licence(name=expression, field="License-Expression", permissive=named <= PERMISSIVE)
    classifiers = [c for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")]
    if classifiers:
        names = [c.rpartition(" :: ")[2] for c in classifiers]
        known = all(name in CLASSIFIERS for name in names)
        return Licence(name=" AND ".join(CLASSIFIERS.get(name, name) for name in names), field="Classifier", permissive=known)
    return Licence(name="none stated", field="", permissive=False)
