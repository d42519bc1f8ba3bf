"""Shades of every colour depth: monotone, legible, and visible on any ground."""

import pytest

from minimha.explain.ramp import ANCHORS, BLACK, RAMPS, WHITE, ink_on, luminance

# What xterm shows for the colours that a terminal keeps by number.
XTERM = {0: (0, 0, 0), 4: (0, 0, 238), 6: (0, 205, 205), 14: (0, 255, 255), 15: WHITE}
XTERM |= {16: BLACK, 231: WHITE, **ANCHORS}


def color(name):
    numbers = tuple(int(part) for part in name[name.index("(") + 1 : -1].split(","))
    return numbers if len(numbers) == 3 else XTERM[numbers[0]]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", ["truecolor", "256", "standard"])
def test_a_ramp_grows_lighter_and_its_numbers_can_be_read(name):
    pairs = [style.split(" on ") for _, style in RAMPS[name].shades]
    grounds = [luminance(color(ground)) for _, ground in pairs]
    assert grounds == sorted(set(grounds))
    assert min(contrast(color(ink), color(ground)) for ink, ground in pairs) >= 4.5


@pytest.mark.parametrize("name", ["truecolor", "256", "standard"])
def test_a_ramp_for_a_light_ground_grows_darker(name):
    light = RAMPS[f"{name} on light"]
    assert light.shades == RAMPS[name].shades[::-1]
    assert light.in_color


def test_a_ground_has_the_ink_with_more_contrast():
    for level in range(256):
        ground = (level, level, level)
        assert contrast(ink_on(ground), ground) >= 4.5


def test_the_256_colours_are_those_of_the_cube():
    steps = (0, 95, 135, 175, 215, 255)
    for number, found in ANCHORS.items():
        n = number - 16
        assert found == (steps[n // 36], steps[n // 6 % 6], steps[n % 6])
