"""Plans, shapes, the mix of clients, and the texts they send."""

import random
from pathlib import Path

import pytest
import typer

from loadtest.common import texts
from loadtest.load.command import KINDS, chosen
from loadtest.load.plan import DRAIN, SOURCES, LoadPlan, stages
from loadtest.load.shapes import RAMP, Shape

ENCODER = {"embed": "a", "rerank": "a"}


def plan(**more: object) -> LoadPlan:
    values = {"url": "http://127.0.0.1:1", "out": Path("out"), "seed": 0, "mix": {"embed": 1}, "models": ENCODER, "rate": 20}
    return LoadPlan(**{"stages": stages(Shape.steady, 60), "open_loop": True, **values, **more})


def test_an_open_loop_has_sources_that_add_up_to_its_rate():
    made = plan(rate=37.0)
    assert made.users(1.0) * made.source_rate == pytest.approx(37.0)
    assert made.users(3.0) == 3 * SOURCES
    assert made.users(0) == 0


def test_a_closed_loop_has_clients():
    assert plan(open_loop=False, rate=16).users(0.5) == 8


@pytest.mark.parametrize("shape", Shape)
def test_a_shape_fills_its_time_and_then_drains(shape: Shape):
    made = stages(shape, 100)
    assert sum(stage.seconds for stage in made[:-1]) == pytest.approx(100)
    assert made[-1] == DRAIN
    assert len({stage.name for stage in made}) == len(made)


def test_what_is_particular_about_each_shape():
    levels = {shape: {stage.name: stage.level for stage in stages(shape, 100)} for shape in Shape}
    assert levels[Shape.overload]["overload"] == 3 * levels[Shape.overload]["knee"]
    assert [level for name, level in levels[Shape.ramp].items() if name.startswith("x")] == sorted(RAMP)
    assert levels[Shape.spike]["before"] == levels[Shape.spike]["after"] < levels[Shape.spike]["spike"]
    (crowd,) = [stage for stage in stages(Shape.crowd, 100, idle=1000, slow=20) if stage.idle]
    assert (crowd.name, crowd.idle, crowd.slow) == ("crowd", 1000, 20)


def test_a_mix_is_what_the_service_can_answer():
    assert set(chosen(None, ENCODER)) == set(KINDS) - {"completion", "chat"}
    assert chosen("embed=3, hostile", ENCODER) == {"embed": 3, "hostile": 1}


@pytest.mark.parametrize(
    ("mix", "words"), [("embde=1", "kinds: embed"), ("embed=x", "KIND=SHARE"), ("embed=0", "KIND=SHARE"), ("chat", "no model")]
)
def test_a_mix_that_cannot_be_is_refused(mix: str, words: str):
    with pytest.raises(typer.BadParameter, match=words):
        chosen(mix, ENCODER)


# Texts -----------------------------------------------------------------------------------------------------------------------------------


def test_lengths_are_log_normal_within_their_bounds():
    draw = random.Random(0)
    lengths = sorted(texts.PASSAGE.draw(draw) for _ in range(20_000))
    assert lengths[10_000] == pytest.approx(texts.PASSAGE.median, rel=0.03)
    # half of a log-normal lies within 0.674 sigma of the median's logarithm
    assert lengths[15_000] == pytest.approx(texts.PASSAGE.median * 2.718 ** (0.674 * texts.PASSAGE.sigma), rel=0.05)
    assert lengths[0] >= texts.PASSAGE.fewest
    assert lengths[-1] <= texts.PASSAGE.most


def test_code_is_python():
    draw = random.Random(0)
    for _ in range(200):
        compile(texts.code(draw), "code", "exec")
