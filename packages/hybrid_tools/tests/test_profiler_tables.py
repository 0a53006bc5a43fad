"""The profiler's tables with bars, against tables that the documents print."""

from __future__ import annotations

from bevquant_hybrid_tools.quant_profiler import render_stages
from bevquant_hybrid_tools.quant_profiler._tables import grid_table

WEIGHTS = """\
+-----------------+--------------------------------------------------------------+----------------+-----------+
| Module Name     | Module Type                                                  | weight dtype   |   ch_axis |
|-----------------+--------------------------------------------------------------+----------------+-----------|
| convmod1.add    | <class 'horizon_plugin_pytorch.nn.qat.conv2d.ConvAddReLU2d'> | qint16         |         0 |
| convmod2.conv2d | <class 'horizon_plugin_pytorch.nn.qat.conv2d.Conv2d'>        | qint16         |         0 |
+-----------------+--------------------------------------------------------------+----------------+-----------+"""  # noqa: E501

SIMILARITY = """\
+---------+----------------------------+----------------------------------------------------------------------------+--------------+-----------+----------------+------------------+------------------------+
| Index   | Module Name                | Module Type                                                                | Similarity   | qscale    | Acc Error      | Acc Error        | Op Error with Same     |
|         |                            |                                                                            |              |           | (float atol)   | (N out_qscale)   | Input (N out_qscale)   |
|---------+----------------------------+----------------------------------------------------------------------------+--------------+-----------+----------------+------------------+------------------------|
| 9       | quantized_ops.2.sum        | <class 'horizon_plugin_pytorch.nn.qat.functional_modules.FloatFunctional'> | 1.0000000    | 0.0002541 | 0.0005081      | 2                | 2                      |
| 10      | quantized_ops.2.reciprocal | <class 'horizon_plugin_pytorch.nn.qat.segment_lut.SegmentLUT'>             | 1.0000001    | 0.0000037 | 0.0000186      | 5                | 5                      |
| 18      | dequant_stub               | <class 'horizon_plugin_pytorch.nn.qat.stubs.DeQuantStub'>                  | 1.0000000    |           | 0.0000000      | 0                | 0                      |
+---------+----------------------------+----------------------------------------------------------------------------+--------------+-----------+----------------+------------------+------------------------+"""  # noqa: E501


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_bars_around_columns_with_integers() -> None:
    lines = WEIGHTS.splitlines()
    rows = [[*cells(line)[:3], int(cells(line)[3])] for line in lines[3:-1]]
    assert grid_table(cells(lines[1]), rows) == WEIGHTS


def test_titles_of_two_lines() -> None:
    lines = SIMILARITY.splitlines()
    titles = [
        "\n".join(part for part in pair if part)
        for pair in zip(cells(lines[1]), cells(lines[2]), strict=True)
    ]
    assert grid_table(titles, [cells(line) for line in lines[4:-1]]) == SIMILARITY


def test_no_rows_leave_the_titles() -> None:
    assert render_stages([]) == (
        "operator    class    on    elements    free    steps    forced    steps    compiled\n"
        "----------  -------  ----  ----------  ------  -------  --------  -------  ----------"
    )
