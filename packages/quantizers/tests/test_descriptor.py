import numpy as np
import pytest

from bevquant_quantizers import tensor_quant
from bevquant_quantizers.tensor_quant import QuantDescriptor, ScaledQuantDescriptor

DESCRIPTORS = [
    {},
    {"num_bits": 4, "name": "x", "unsigned": True},
    {"axis": (0, 1, 3)},
    {"axis": 0, "fake_quant": False},
    {"amax": 1.5, "learn_amax": True},
    {"amax": [0.1, 0.2], "scale_amax": 0.9},
]


def test_defaults_and_values():
    desc = QuantDescriptor()
    assert (desc.num_bits, desc.name, desc.fake_quant, desc.axis) == (8, None, True, None)
    assert (desc.amax, desc.learn_amax, desc.scale_amax) == (None, False, None)
    assert (desc.calib_method, desc.unsigned, desc.narrow_range) == ("max", False, False)
    desc = QuantDescriptor(5, "n", axis=(0, 2), amax=0.7, calib_method="histogram", unsigned=True)
    assert (desc.num_bits, desc.name, desc.axis, desc.unsigned) == (5, "n", (0, 2), True)
    assert desc.amax.dtype == np.float32
    assert desc.amax == np.float32(0.7)
    assert ScaledQuantDescriptor is QuantDescriptor


def test_amax_forms():
    for amax in ([1.0, 2.0], np.array([1.0, 2.0])):
        np.testing.assert_array_equal(QuantDescriptor(amax=amax).amax, np.float32([1, 2]))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_bits": "8"}, TypeError, "num_bits"),
        ({"num_bits": -1}, ValueError, ">= 0"),
        ({"num_bits": 1}, ValueError, "no positive integer"),
        ({"amax": float("nan")}, ValueError, "numbers that float32 holds"),
        ({"amax": [1.0, float("inf")]}, ValueError, "numbers that float32 holds"),
        ({"name": 3}, TypeError, "name"),
        ({"amax": "1"}, TypeError, "amax must be float, list or ndarray"),
        ({"axis": 0, "learn_amax": True}, TypeError, "axis"),
        ({"quant_axis": 0}, TypeError, "Unused keys"),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        QuantDescriptor(**arguments)


@pytest.mark.parametrize("arguments", DESCRIPTORS)
def test_read_only(arguments):
    with pytest.raises(AttributeError):
        QuantDescriptor(**arguments).num_bits = 4


@pytest.mark.parametrize(
    "arguments", [*DESCRIPTORS, {"narrow_range": True}, {"calib_method": None}]
)
def test_round_trips(arguments):
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    desc = QuantDescriptor(**arguments)
    assert QuantDescriptor(**desc.dict()) == desc
    assert QuantDescriptor.from_yaml(desc.to_yaml()) == desc


@pytest.mark.parametrize("other", DESCRIPTORS[1:])
def test_equality(other):
    assert QuantDescriptor(**other) == QuantDescriptor(**other)
    assert QuantDescriptor(**other) != QuantDescriptor()


def test_equality_with_arrays():
    assert QuantDescriptor(amax=[1.0, 2.0]) == QuantDescriptor(amax=[1.0, 2.0])
    assert QuantDescriptor(amax=[1.0, 2.0]) != QuantDescriptor(amax=[1.0, 3.0])
    assert QuantDescriptor() != "descriptor"


@pytest.mark.parametrize("arguments", DESCRIPTORS)
def test_same_words_as_upstream(upstream, arguments):
    ours, theirs = QuantDescriptor(**arguments), upstream.tensor_quant.QuantDescriptor(**arguments)
    assert str(ours) == str(theirs)
    assert ours.dict() == theirs.dict()
    if not isinstance(arguments.get("axis"), int):  # upstream's to_yaml fails on an int
        assert ours.to_yaml() == theirs.to_yaml()
        assert QuantDescriptor.from_yaml(theirs.to_yaml()) == ours


def test_predefined_like_upstream(upstream):
    names = [name for name in dir(upstream.tensor_quant) if name.startswith("QUANT_DESC_")]
    assert len(names) == 9
    for name in names:
        assert getattr(tensor_quant, name).dict() == getattr(upstream.tensor_quant, name).dict()
        assert name in tensor_quant.__all__


def test_yaml_needs_a_mapping():
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    with pytest.raises(TypeError, match="mapping"):
        QuantDescriptor.from_yaml("- 1")


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"num_bits": 64}, ValueError, "at most 32"),
        ({"amax": [10**400]}, ValueError, "amax must be numbers"),
        ({"amax": [[1.0], [2.0, 3.0]]}, ValueError, "amax must be numbers"),
        ({"axis": "0"}, TypeError, "axis must be an integer"),
        ({"axis": (0, None)}, TypeError, "axis must be an integer"),
        ({"scale_amax": 10**400}, TypeError, "scale_amax must be a finite number"),
        ({"scale_amax": {}}, TypeError, "scale_amax must be a finite number"),
    ],
)
def test_settings_that_no_quantizer_can_use(settings, error, words):
    with pytest.raises(error, match=words):
        QuantDescriptor(**settings)


@pytest.mark.parametrize(
    "text", ["num_bits: [", "num_bits: `", "\x07", "[" * 5000, "&a [*a", "amax: 2020-99-99"]
)
def test_yaml_that_is_none_is_one_value_error(text):
    pytest.importorskip("yaml")
    with pytest.raises(ValueError, match="YAML cannot be read"):
        QuantDescriptor.from_yaml(text)
