from __future__ import annotations

import copy

import pytest
import torch

import bevquant_hybrid as horizon
from bevquant_hybrid.dtype import qinfo, qint8, qint16, qint32
from bevquant_hybrid.march import March, get_march, require_march, set_march


@pytest.mark.parametrize("name", ["bayes", "BAYES", March.BAYES, "bayes_e", "Bernoulli2"])
def test_a_march_goes_by_its_name_in_any_case(name: str) -> None:
    horizon.march.set_march(name)
    assert get_march() == str(name).lower().replace("_", "-")


def test_an_unknown_march_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'volta'.*bernoulli2, bayes, bayes-e"):
        set_march("volta")


def test_who_needs_a_march_says_so() -> None:
    horizon.march._chosen.clear()
    with pytest.raises(RuntimeError, match=r"prepare_qat_fx: no march is set.*set_march"):
        require_march("prepare_qat_fx")


@pytest.mark.parametrize("kind", [qint8, qint16, qint32])
def test_ranges_are_those_of_the_integers_that_hold_them(kind) -> None:
    info = torch.iinfo(kind.storage)
    assert (qinfo(kind).min, qinfo(kind).max, qinfo(kind).bits) == (info.min, info.max, info.bits)
    assert f"{kind}" == repr(kind) == str(kind)
    assert copy.deepcopy(kind) == kind


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="expected qint8, qint16 or qint32"):
        qinfo("int8")


def test_package_names_of_the_documents() -> None:
    assert horizon.quantization.March is horizon.March is horizon.march.March
    assert horizon.dtype.qint8 == "qint8"
    assert horizon.__version__
