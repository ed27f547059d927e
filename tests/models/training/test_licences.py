"""Only packages whose metadata names permissive licences, and no others, may be trained on."""

from email.message import Message

import pytest

from models.training.licences import licence_of


def metadata(**fields: str | list[str]) -> Message:
    message = Message()
    for name, values in fields.items():
        for value in [values] if isinstance(values, str) else values:
            message[name.replace("_", "-")] = value
    return message


@pytest.mark.parametrize("expression", ["MIT", "Apache-2.0 WITH LLVM-exception", "BSD-3-Clause AND (MIT OR Zlib)", "0BSD", "MIT-CMU"])
def test_permissive_expressions(expression: str) -> None:
    licence = licence_of(metadata(License_Expression=expression))
    assert licence.permissive
    assert (licence.name, licence.field) == (expression, "License-Expression")


@pytest.mark.parametrize(
    "expression", ["GPL-3.0-only", "MPL-2.0 AND MIT", "MIT OR LGPL-2.1-or-later", "LicenseRef-Proprietary", "CC-BY-SA-4.0"]
)
def test_one_other_licence_is_too_many(expression: str) -> None:
    assert not licence_of(metadata(License_Expression=expression)).permissive


def test_an_expression_wins_over_a_classifier() -> None:
    both = metadata(License_Expression="GPL-2.0-only", Classifier="License :: OSI Approved :: MIT License")
    assert not licence_of(both).permissive


def test_all_classifiers_must_be_permissive() -> None:
    mit, mozilla = "License :: OSI Approved :: MIT License", "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)"
    assert licence_of(metadata(Classifier=["Programming Language :: Python", mit])).name == "MIT"
    assert not licence_of(metadata(Classifier=[mit, mozilla])).permissive


def test_nothing_stated_is_not_a_licence() -> None:
    licence = licence_of(metadata(License="MIT"))
    assert (licence.name, licence.permissive) == ("none stated", False)
