"""Class names: nuScenes' ten detection classes, and other data sets' names for them.

An object of another class keeps its data set's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bev_data._errors import InputError

# nuScenes' detection task: https://www.nuscenes.org/object-detection
NUSCENES_NAMES = {
    "vehicle.car": "car",
    "vehicle.truck": "truck",
    "vehicle.bus.bendy": "bus",
    "vehicle.bus.rigid": "bus",
    "vehicle.trailer": "trailer",
    "vehicle.construction": "construction_vehicle",
    "vehicle.motorcycle": "motorcycle",
    "vehicle.bicycle": "bicycle",
    "human.pedestrian.adult": "pedestrian",
    "human.pedestrian.child": "pedestrian",
    "human.pedestrian.construction_worker": "pedestrian",
    "human.pedestrian.police_officer": "pedestrian",
    "movable_object.trafficcone": "traffic_cone",
    "movable_object.barrier": "barrier",
}

# nuScenes counts pick-ups among trucks and scooters among motorcycles.
PANDASET_NAMES = {
    "Car": "car",
    "Pickup Truck": "truck",
    "Medium-sized Truck": "truck",
    "Semi-truck": "truck",
    "Bus": "bus",
    "Towed Object": "trailer",
    "Other Vehicle - Construction Vehicle": "construction_vehicle",
    "Motorcycle": "motorcycle",
    "Motorized Scooter": "motorcycle",
    "Bicycle": "bicycle",
    "Pedestrian": "pedestrian",
    "Pedestrian with Object": "pedestrian",
    "Cones": "traffic_cone",
    "Pylons": "traffic_cone",
    "Road Barriers": "barrier",
    "Temporary Construction Barriers": "barrier",
}

KITTI_NAMES = {
    "Car": "car",
    "Van": "car",
    "Truck": "truck",
    "Pedestrian": "pedestrian",
    "Person_sitting": "pedestrian",
    "Cyclist": "bicycle",
}


def detection_names(names: Sequence[str]) -> tuple[str, ...]:
    """Classes of a detector by nuScenes' names; as they are where two would get one name.

    Args:
        names: Of nuScenes, KITTI, Waymo or PandaSet; others stay.

    Example:
        >>> detection_names(["Pedestrian", "Cyclist", "Car"]), detection_names(["Car", "Van"])
        (('pedestrian', 'bicycle', 'car'), ('Car', 'Van'))
    """
    found = tuple((PANDASET_NAMES | KITTI_NAMES | NUSCENES_NAMES).get(name, name) for name in names)
    return found if len(set(found)) == len(found) else tuple(names)


def translate(
    names: Iterable[str],
    table: Mapping[str, str],
    classes: Mapping[str, str] | None = None,
    where: str = "",
) -> tuple[str, ...]:
    """Names of the ten classes where there is one, else as they were; then the caller's.

    Args:
        names: of the data set.
        table: the ten classes' names, by those of the data set.
        classes: the caller's names, by names of the data set or of the ten classes.
        where: the data set, if `names` are all of its classes: another one in `classes` is refused.

    Raises:
        InputError: `classes` has a name that the data set lacks.
    """
    listed = tuple(names)
    chosen = classes or {}
    unknown = [name for name in chosen if name not in (*listed, *map(table.get, listed))]
    if where and unknown:
        raise InputError(
            f"classes= renames {', '.join(unknown)}, no class of {where}, which has "
            f"{', '.join(listed)}"
        )
    known = (table.get(name, name) for name in listed)
    return tuple(
        chosen.get(own, chosen.get(name, name)) for own, name in zip(listed, known, strict=True)
    )
