"""Decides which installed packages may be used for training: those whose metadata names permissive licences only.

Three fields are read in this order, and the first that is not empty decides: License-Expression (PEP 639, SPDX), the licence classifiers,
the free field License. An expression is accepted only if every licence in it is permissive, even if they are joined by OR.
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
FREE_TEXT: Mapping[str, str] = {  # first line of the field License, in lower case -> SPDX name
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "bsd-2-clause": "BSD-2-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "isc": "ISC",
    "mit": "MIT",
    "mit license": "MIT",
    "psf-2.0": "PSF-2.0",
}


@dataclass(frozen=True, kw_only=True)
class Licence:
    """The licence in a package's metadata: its SPDX name if it is known, else the text of the metadata."""

    name: str
    field: str  # the metadata field it was read from; "" if all are empty
    permissive: bool


def licence_of(metadata: PackageMetadata) -> Licence:
    """Return the licence that the metadata of an installed distribution (`importlib.metadata`) states."""
    expression, free_text = ((metadata.get_all(field) or [""])[0] or "" for field in ("License-Expression", "License"))
    if expression:
        named = set(re.findall(r"[A-Za-z0-9.+-]+", expression)) - {"AND", "OR", "WITH"}
        return Licence(name=expression, field="License-Expression", permissive=named <= PERMISSIVE)
    classifiers = [c for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")]
    if classifiers:
        names = [c.rpartition(" :: ")[2] for c in classifiers]
        known = all(name in CLASSIFIERS for name in names)
        return Licence(name=" AND ".join(CLASSIFIERS.get(name, name) for name in names), field="Classifier", permissive=known)
    first_line = free_text.strip().partition("\n")[0].strip()
    if first_line:
        spdx = FREE_TEXT.get(first_line.lower())
        return Licence(name=spdx or first_line, field="License", permissive=spdx is not None)
    return Licence(name="none stated", field="", permissive=False)
