"""Columns by name and by order: one set of rules for every format."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from point_files import drive, records, write_pcd

from bev_data.cameras import Camera
from bev_data.datasets import open_dataset, write_frame_folder
from bev_data.points import Frame, Labels, PointsError, read_frames, read_points, save_tensor

NAMED = ("pcd", "npy", "npz", "feather")


def write_named(folder, columns, kind):
    path = folder / f"a.{kind}"
    if kind == "pcd":
        return write_pcd(path, columns)
    if kind == "npy":
        np.save(path, records(columns))
    elif kind == "npz":
        np.savez(path, **columns)
    else:
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow (the extra feather) is missing")
        feather = pytest.importorskip("pyarrow.feather")
        feather.write_feather(pyarrow.table(columns), str(path), compression="uncompressed")
    return path


def write_rows(folder, rows, kind):
    path = folder / f"a.{kind}"
    if kind == "npz":
        np.savez(path, points=rows)
    elif kind == "npy":
        np.save(path, rows)
    elif kind == "tensor":
        save_tensor(path, rows)
    else:
        rows.astype(rows.dtype.newbyteorder("<")).tofile(path)
    return path


ROWS = ("bin", "npy", "npz", "tensor")


@pytest.mark.parametrize("kind", NAMED)
def test_argoverse_sweep(tmp_path, kind):
    columns = drive()
    columns = {
        n: v.astype(np.float16) if n in "xyz" and kind != "pcd" else v for n, v in columns.items()
    }
    points = read_points(write_named(tmp_path, columns, kind), axes="forward,left,up").points
    np.testing.assert_array_equal(points[:, 0], -columns["y"].astype(np.float32))
    np.testing.assert_array_equal(points[:, 1], columns["x"].astype(np.float32))
    np.testing.assert_array_equal(points[:, 3], columns["intensity"].astype(np.float32))
    lag = (columns["offset_ns"].max() - columns["offset_ns"]) * 1e-9
    np.testing.assert_allclose(points[:, 4], lag, atol=1e-8)
    assert points[:, 4].min() == 0


@pytest.mark.parametrize("kind", NAMED)
def test_names_are_given(tmp_path, kind):
    columns = drive()
    columns["refl"] = (columns.pop("intensity") / 255).astype(np.float32)
    columns["t"] = columns.pop("offset_ns").astype(np.uint32)
    path = write_named(tmp_path, columns, kind)
    with pytest.raises(PointsError, match=r"columns x, y, z, .*; none is the intensity") as info:
        read_points(path)
    assert "read intensity 0 with columns='x,y,z'" in str(info.value)
    points = read_points(path, columns="x,y,z,intensity:refl,timestamp_ns:t").points
    np.testing.assert_allclose(points[:, 3], drive()["intensity"], rtol=1e-6)
    assert points[:, 4].max() == pytest.approx(np.ptp(columns["t"]) * 1e-9)
    assert not read_points(path, columns=["x", "y", "z"]).points[:, 3:].any()
    with pytest.raises(PointsError, match="there is no 'power', which columns= gives as intensity"):
        read_points(path, columns="x,y,z,intensity:power")
    with pytest.raises(PointsError, match="they have names, so leave columns=4 out"):
        read_points(path, columns=4)


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("name", ["t", "timestamp", "Time_Stamp"])
def test_a_time_of_unknown_unit_is_refused_with_both_remedies(tmp_path, kind, name):
    if kind == "npz" and name == "Time_Stamp":
        pytest.skip("arrays of an archive are looked up by their exact names")
    columns = drive()
    columns[name] = columns.pop("offset_ns")
    path = write_named(tmp_path, columns, kind)
    with pytest.raises(PointsError, match=f"the unit of the time {name} is in doubt") as info:
        read_points(path)
    for remedy in (f"x,y,z,intensity,timestamp_ns:{name}", "x,y,z,intensity"):
        assert f"columns='{remedy}'" in str(info.value)
        assert len(read_points(path, columns=remedy)) == 50


def test_two_candidates_are_in_doubt(tmp_path):
    columns = drive()
    columns["reflectivity"] = columns.pop("intensity")
    columns["remission"] = columns["reflectivity"]
    path = write_named(tmp_path, columns, "npy")
    with pytest.raises(PointsError, match="reflectivity and remission may be the intensity"):
        read_points(path)
    columns["intensity"] = columns["remission"] // 2  # the name itself comes first
    path = write_named(tmp_path, columns, "npy")
    np.testing.assert_array_equal(read_points(path).points[:, 3], columns["intensity"])
    points = read_points(path, columns="x,y,z,remission").points  # so does the word that is said
    np.testing.assert_array_equal(points[:, 3], columns["remission"])


def six(rows=200):
    columns = drive(rows)
    made = np.stack(
        [columns[n].astype(np.float64) for n in ("x", "y", "z", "intensity", "laser_number")], 1
    )
    return np.column_stack([made, np.linspace(0, 0.1, rows)])


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("dtype", ["<f4", "<f8", ">f4", ">f8"])
def test_rows_of_six_columns(tmp_path, kind, dtype):
    if (kind, dtype[1:]) == ("tensor", "f8"):
        pytest.skip("the format has no float64")
    rows = six()
    path = write_rows(tmp_path, rows.astype(dtype), kind)
    said = {"dtype": "float64"} if dtype[1:] == "f8" else {}
    with pytest.raises(PointsError, match="x,y,z,intensity,ring,-"):
        read_points(path, **said)
    points = read_points(path, columns="x,y,z,intensity,ring,offset", **said).points
    np.testing.assert_allclose(points[:, :4], rows[:, :4], rtol=1e-6)
    np.testing.assert_allclose(points[:, 4], 0.1 - rows[:, 5], atol=1e-7)
    points = read_points(path, columns="x,y,z,intensity,ring,time", **said).points
    np.testing.assert_allclose(points[:, 4], rows[:, 5], atol=1e-7)
    assert not read_points(path, columns="x,y,z,intensity,-,-", **said).points[:, 4].any()
    with pytest.raises(PointsError, match=r"gives the names ring, but .* has none"):
        read_points(path, columns="x,y,z,intensity,laser_number:ring,-", **said)
    if kind != "bin":
        with pytest.raises(PointsError, match=r"has shape \[200, 6\]; expected \[N, 5\]"):
            read_points(path, columns="x,y,z,intensity,ring")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_bin_of_six_columns_is_told_from_other_types(tmp_path, dtype):
    rows = six().astype(dtype)
    path = write_rows(tmp_path, rows, "bin")
    points = read_points(path, columns="x,y,z,intensity,ring,time").points
    np.testing.assert_array_equal(points[:, :4], rows[:, :4].astype(np.float32))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(PointsError, match="bytes is not a multiple of any row size tried"):
        read_points(path, columns="x,y,z,intensity,ring,time")


@pytest.mark.parametrize("kind", ROWS)
def test_order_of_columns(tmp_path, kind):
    rows = six().astype(np.float32)
    path = write_rows(tmp_path, np.ascontiguousarray(rows[:, [3, 0, 1, 2]]), kind)
    points = read_points(path, columns="intensity,x,y,z").points
    np.testing.assert_array_equal(points[:, :4], rows[:, :4])
    with pytest.raises(PointsError, match="intensity spans -"):
        read_points(path, columns="x,y,z,intensity")
    path = write_rows(tmp_path, np.ascontiguousarray(rows[:, :3]), kind)
    assert not read_points(path, columns="x,y,z", dtype="float32").points[:, 3:].any()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("x,y,z,intensty", r"has 'intensty', none of x, y, z, intensity, .*ROLE:NAME"),
        ("x,y,intensity", "x, y, intensity; z missing"),
        ("x,y,z,z", "each role, and a time, at most once"),
        ("x,y,z,time,offset_ns", "each role, and a time, at most once"),
        ("", "has '', none of"),
        (4.5, "has '4.5', none of x"),
        ((), "x, y, z missing"),
        (6, "without names a file has 4 columns"),
        ("12", "without names a file has 4 columns"),
    ],
)
def test_columns_that_cannot_be(tmp_path, columns, message):
    np.save(tmp_path / "a.npy", six())
    with pytest.raises(PointsError, match=message):
        read_points(tmp_path / "a.npy", columns=columns)
    for opened in (read_frames, partial(open_dataset, "files")):  # before a frame is read
        with pytest.raises(PointsError, match=message):
            opened(tmp_path / "a.npy", columns=columns)
        with pytest.raises(ValueError, match="expected the directions"):
            opened(tmp_path / "a.npy", axes="forward,left")


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": lambda v: v * 1000}, "coordinates reach 5.*metres from the scanner.*millimetres"),
        ({"y": lambda v: v + 5e6}, "map's coordinates"),
        ({"intensity": lambda v: v.astype(np.uint16) * 257}, r"spans 0..6.528e.*intensity_scale="),
        ({"intensity": lambda v: v.astype(np.float32) - 128}, "intensity spans -124"),
        ({"offset_ns": lambda v: v.astype(np.int64) * 1000}, "time lag reaches .* expected"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_right(tmp_path, kind, change, message):
    columns = drive()
    for name, function in change.items():
        columns[name] = function(
            columns[name].astype(np.float64) if name in "xy" else columns[name]
        )
    with pytest.raises(PointsError, match=message):
        read_points(write_named(tmp_path, columns, kind))


def test_normalised_coordinates_are_refused(tmp_path):
    rows = six(2000)
    rows[:, :3] /= 70
    np.save(tmp_path / "a.npy", rows)
    with pytest.raises(PointsError, match=r"coordinates of 2000 points reach 0\.8.*normalised"):
        read_points(tmp_path / "a.npy", columns="x,y,z,intensity,ring,time")


@pytest.mark.parametrize("kind", NAMED)
def test_intensity_scales(tmp_path, kind):
    columns = drive()
    whole = columns["intensity"].astype(np.float32)
    for values, said, expected in (
        (whole / 255, {}, whole),
        (whole, {}, whole),
        (columns["intensity"].astype(np.uint16) * 257, {"intensity_scale": 1 / 257}, whole),
        (np.minimum(columns["intensity"], 1), {}, np.ones(50)),  # integers keep their scale
        (whole / 255, {"intensity_scale": 1.0}, whole / 255),
    ):
        columns["intensity"] = values
        points = read_points(write_named(tmp_path, columns, kind), **said).points
        np.testing.assert_allclose(points[:, 3], expected, rtol=1e-5)


def test_five_columns_with_small_intensities_are_reported(tmp_path, caplog):
    rows = six(2000)[:, :5].astype(np.float32)
    np.save(tmp_path / "a.npy", rows)
    read_points(tmp_path / "a.npy")
    assert not caplog.text
    rows[:, 3] /= 255
    np.save(tmp_path / "a.npy", rows)
    assert read_points(tmp_path / "a.npy").points[:, 3].max() <= 1
    assert (
        "if they are 0..1, name the columns, as in columns='x,y,z,intensity,ring' (--columns "
        in caplog.text
    )
    said = read_points(tmp_path / "a.npy", columns="x,y,z,intensity,ring")
    np.testing.assert_allclose(said.points[:, 3], rows[:, 3] * 255, rtol=1e-6)


def test_clocks(tmp_path):
    columns = drive()
    seconds = np.linspace(1.6e9, 1.6e9 + 0.1, 50)
    columns["timestamp"] = seconds
    del columns["offset_ns"]
    said = "x,y,z,intensity,timestamp"
    points = read_points(write_named(tmp_path, columns, "npy"), columns=said).points
    np.testing.assert_allclose(points[:, 4], 0.1 - np.linspace(0, 0.1, 50), atol=1e-6)
    columns["timestamp"] = seconds.astype(np.float32)
    with pytest.raises(
        PointsError, match=r"timestamp reaches 1\.6e\+09 as float32, whose steps .*128"
    ):
        read_points(write_named(tmp_path, columns, "npy"), columns=said)
    columns["timestamp"] = (seconds * 1e6).astype(np.uint64)
    points = read_points(
        write_named(tmp_path, columns, "npy"), columns=f"{said}_us:timestamp"
    ).points
    np.testing.assert_allclose(points[:, 4], 0.1 - np.linspace(0, 0.1, 50), atol=2e-6)
    columns["time"] = np.linspace(-0.1, 0.0005, 50)  # up to the end of the sweep
    del columns["timestamp"]
    points = read_points(write_named(tmp_path, columns, "npy")).points
    np.testing.assert_allclose(points[:, 4], np.abs(columns["time"]), rtol=1e-6)


def test_integers_and_texts_where_numbers_are_expected(tmp_path):
    columns = drive()
    columns["intensity"] = np.array(["high"] * 50)
    with pytest.raises(PointsError, match="'intensity' is <U4, expected numbers"):
        read_points(write_named(tmp_path, columns, "npy"))
    np.savez(tmp_path / "b.npz", **{**drive(), "z": np.zeros(3)})
    with pytest.raises(PointsError, match="columns of several lengths"):
        read_points(tmp_path / "b.npz")


AXES = [
    ("forward,left,up", (0, 1, 0)),
    ("back,right,up", (0, -1, 0)),
    ("forward,right,up", (0, 1, 0)),
    ("up, right,forward", (0, 0, 1)),
    (("left", "up", "back"), (-1, 0, 0)),
]


@pytest.mark.parametrize(("axes", "x_points_to"), AXES)
def test_axes_turn_points_and_labels(tmp_path, axes, x_points_to):
    path = tmp_path / "a.npz"
    boxes = np.array([[7.0, 0, 0, 4, 2, 1.5, 0]])
    np.savez(path, points=np.array([[5.0, 0, 0, 9, 0]]), boxes=boxes, names=["Car"])
    frame = read_points(path, axes=axes)
    np.testing.assert_array_equal(frame.points[0], [*np.multiply(5, x_points_to), 9, 0])
    np.testing.assert_allclose(frame.labels.boxes[0, :3], np.multiply(7, x_points_to))
    if x_points_to[2] == 0:
        yaw = frame.labels.boxes[0, 6]
        np.testing.assert_allclose([np.cos(yaw), np.sin(yaw)], x_points_to[:2], atol=1e-6)


@pytest.mark.parametrize("axes", ["forward,left", "forward,back,up", "ahead,left,up", "", None])
def test_axes_that_cannot_be(tmp_path, axes):
    np.save(tmp_path / "a.npy", six()[:, :5])
    with pytest.raises(ValueError, match="expected the directions of x, y and z"):
        read_points(tmp_path / "a.npy", axes=axes)


def test_axes_turn_a_frame_folder_as_a_whole(tmp_path):
    pose = np.array([[1.0, 0, 0, 0], [0, 0, -1, -0.3], [0, 1, 0, -0.7], [0, 0, 0, 1]])
    turn = np.array([[0.0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    image, matrix = (
        np.zeros((36, 64, 3), np.uint8),
        np.array([[50.0, 0, 32], [0, 50, 18], [0, 0, 1]]),
    )
    boxes = np.array([[7, 1, 0, 4, 2, 1.5, 0.5]], np.float32)
    labels = Labels(boxes, ("car",), np.array([[3, 1]], np.float32))
    points = six()[:, :5].astype(np.float32)
    forward = Frame(
        "f", points, labels=labels, cameras=(Camera("CAM_FRONT", image, matrix, pose @ turn),)
    )
    write_frame_folder(tmp_path / "f", forward)
    (frame,) = open_dataset("files", tmp_path / "f", axes="forward,left,up")
    np.testing.assert_allclose(frame.cameras[0].lidar_to_camera, pose, atol=1e-12)
    np.testing.assert_allclose(frame.labels.velocities, [[-1, 3]])
    np.testing.assert_allclose(
        frame.labels.boxes[0, [0, 1, 6]], [-1, 7, 0.5 + np.pi / 2], rtol=1e-6
    )
    np.testing.assert_array_equal(frame.points[:, 1], points[:, 0])


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"no array", b"PK\x03\x04"])
@pytest.mark.parametrize("kind", ["npy", "feather", "pcd", "npz"])
def test_files_of_another_kind(tmp_path, kind, content):
    if kind == "feather":
        pytest.importorskip("pyarrow.feather")
    (tmp_path / f"a.{kind}").write_bytes(content)
    with pytest.raises(PointsError, match=rf"a\.{kind}"):
        read_points(tmp_path / f"a.{kind}")


@pytest.mark.parametrize("kind", ["npy", "feather", "npz"])
def test_cut_files(tmp_path, kind):
    path = write_named(tmp_path, drive(200), kind)
    raw = path.read_bytes()
    for part in (0.2, 0.5, 0.9, 0.99):
        path.write_bytes(raw[: int(len(raw) * part)])
        with pytest.raises(PointsError, match=rf"a\.{kind}"):
            read_points(path)


@pytest.mark.parametrize("kind", NAMED)
def test_empty_and_nan(tmp_path, kind):
    if kind != "pcd":
        with pytest.raises(PointsError, match="holds no points"):
            read_points(write_named(tmp_path, drive(0), kind))
    columns = drive()
    columns["z"][3] = np.nan
    path = write_named(tmp_path, columns, kind)
    with pytest.raises(PointsError, match="1 of 50 rows hold NaN or Inf"):
        read_points(path)
    assert len(read_points(path, nonfinite="drop")) == 49


def test_objects_and_pickles_are_never_loaded(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{"x": 1}], dtype=object))
    with pytest.raises(PointsError, match="pickled Python objects, which are never loaded"):
        read_points(tmp_path / "a.npy")
    for name in ("00.pkl.gz", "00.pkl"):
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit'\ntR.")
        with pytest.raises(
            PointsError, match=r"a pickle can run code.*to_feather\('00\.feather'\)"
        ):
            read_points(tmp_path / name)


def test_a_missing_pyarrow_is_named_with_its_extra(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow.feather", None)
    (tmp_path / "a.feather").write_bytes(b"ARROW1")
    with pytest.raises(PointsError, match=r"read with pyarrow, .*bev_data\[feather\]"):
        read_points(tmp_path / "a.feather")


def test_nulls_of_a_feather_file_are_nan(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    feather = pytest.importorskip("pyarrow.feather")
    columns = {n: list(v) for n, v in drive(5).items()} | {"name": list("abcde")}
    columns["x"][2] = None
    for compression in ("uncompressed", "lz4", "zstd"):
        path = tmp_path / f"{compression}.feather"
        feather.write_feather(pyarrow.table(columns), str(path), compression=compression)
        with pytest.raises(PointsError, match="1 of 5 rows hold NaN or Inf, the first is row 2"):
            read_points(path)
