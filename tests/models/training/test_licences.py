"""Only packages whose metadata names permissive licences, and no others, may be trained on."""

from email.message import Message

import pytest

from models.training.licences import licence_of

MIT, MOZILLA = "License :: OSI Approved :: MIT License", "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)"
GPL = {"License-Expression": ["GPL-2.0-only"]}


@pytest.mark.parametrize(
    ("fields", "name", "permissive"),
    [
        *(
            ({"License-Expression": [expression]}, expression, True)
            for expression in ("MIT", "Apache-2.0 WITH LLVM-exception", "BSD-3-Clause AND (MIT OR Zlib)", "0BSD", "MIT-CMU")
        ),
        *(
            ({"License-Expression": [expression]}, expression, False)
            for expression in ("GPL-3.0-only", "MPL-2.0 AND MIT", "MIT OR LGPL-2.1-or-later", "LicenseRef-Proprietary", "CC-BY-SA-4.0")
        ),
        (GPL | {"Classifier": [MIT]}, "GPL-2.0-only", False),
        ({"Classifier": ["Programming Language :: Python", MIT]}, "MIT", True),
        ({"Classifier": [MIT, MOZILLA]}, None, False),
        ({"License": ["MIT"]}, "none stated", False),
    ],
)
def test_every_licence_that_is_stated_must_be_permissive(fields: dict[str, list[str]], name: str | None, permissive: bool) -> None:
    """An expression wins over classifiers, and a free text is no statement."""
    message = Message()
    for field, values in fields.items():
        for value in values:
            message[field] = value
    licence = licence_of(message)
    assert licence.permissive is permissive
    assert name in (None, licence.name)
