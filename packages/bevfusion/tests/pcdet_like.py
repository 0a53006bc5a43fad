"""A package in OpenPCDet's form, of our own: what its imports, builders and heads look like.

`write(folder)` makes a checkout with ``pcdet`` and two configurations.
"""

from __future__ import annotations

from pathlib import Path

FILES = {
    "pcdet/__init__.py": "from .version import __version__\n",
    "pcdet/datasets/__init__.py": "import tools_of_some_data_set\n",
    "pcdet/ops/__init__.py": "",
    "pcdet/ops/iou3d_nms/__init__.py": "",
    "pcdet/models/detectors/__init__.py": """
from pcdet.ops.iou3d_nms import iou3d_nms_cuda


class Detector3DTemplate:
    def post_processing(self, batch):
        boxes, scores = batch["batch_box_preds"][0], batch["batch_cls_preds"][0].sigmoid()
        best, labels = scores.max(1)
        order = best.argsort(descending=True)
        keep = order.new_zeros(len(order))
        number = iou3d_nms_cuda.nms_gpu(boxes[order].contiguous(), keep, 0.1)
        chosen = order[keep[:number].cuda()]
        return [{"pred_boxes": boxes[chosen], "pred_scores": best[chosen],
                 "pred_labels": labels[chosen] + 1}], {}
""",
    "pcdet/models/__init__.py": """
import numba
import numpy as np
import SharedArray
import spconv.pytorch as spconv
import torch
import torch_scatter
from easydict import EasyDict
from torch import nn

from pcdet.datasets.augmentor import augmentor_utils
from .detectors import Detector3DTemplate


class MeanVFE(nn.Module):
    def forward(self, batch):
        count = batch["voxel_num_points"].view(-1, 1).clamp(min=1)
        batch["voxel_features"] = batch["voxels"].sum(1) / count
        return batch


class DynMeanVFE(nn.Module):
    def __init__(self, low, size, grid):
        super().__init__()
        self.low, self.size, self.grid = (
            torch.tensor(np.array(one)).float().cuda() for one in (low, size, grid))

    def forward(self, batch):
        points = batch["points"]
        cells = ((points[:, 1:4] - self.low) / self.size).floor()
        inside = ((cells >= 0) & (cells < self.grid)).all(1)
        cells = cells[inside].long()
        flat = (cells[:, 2] * 16 + cells[:, 1]) * 16 + cells[:, 0]
        unique, owner = flat.unique(return_inverse=True)
        batch["voxel_features"] = torch_scatter.scatter_mean(points[inside, 1:], owner, dim=0)
        zero = unique * 0
        batch["voxel_coords"] = torch.stack(
            [zero, unique // 256, unique // 16 % 16, unique % 16], 1)
        return batch


class Backbone(nn.Module):
    def __init__(self, channels, grid):
        super().__init__()
        self.shape = grid[::-1]
        self.conv = spconv.SparseSequential(
            spconv.SubMConv3d(channels, 16, 3, padding=1, bias=False, indice_key="a"),
            nn.BatchNorm1d(16), nn.ReLU())

    def forward(self, batch):
        x = spconv.SparseConvTensor(
            batch["voxel_features"], batch["voxel_coords"].int(), self.shape, batch["batch_size"])
        batch["encoded_spconv_tensor"] = self.conv(x)
        return batch


class HeightCompression(nn.Module):
    def forward(self, batch):
        x = batch["encoded_spconv_tensor"].dense()
        n, c, d, h, w = x.shape
        batch["spatial_features"] = x.view(n, c * d, h, w)
        return batch


class Bev(nn.Module):
    def __init__(self):
        super().__init__()
        stride = np.round(1 / 1.0).astype(np.int)
        self.block = nn.Sequential(
            nn.Conv2d(64, 16, 3, stride, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())

    def forward(self, batch):
        batch["spatial_features_2d"] = self.block(batch["spatial_features"])
        return batch


@numba.jit(nopython=True)
def half(value):
    return value / 2


class AnchorHead(nn.Module):
    def __init__(self, classes, low, size):
        super().__init__()
        self.conv_cls, self.conv_box = nn.Conv2d(16, classes, 1), nn.Conv2d(16, 7, 1)
        y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        one = torch.ones_like(x)
        self.anchors = torch.stack(
            [(x + half(1.0)) * size[0] + low[0], (y + 0.5) * size[1] + low[1], 0 * x, 4 * one,
             2 * one, one, 0 * x], -1).view(-1, 7).cuda()
        self.forward_ret_dict = {}

    def generate_predicted_boxes(self, batch_size, cls_preds, box_preds):
        boxes = box_preds.view(batch_size, -1, 7) * 0.1 + self.anchors
        return cls_preds.view(batch_size, len(self.anchors), -1), boxes

    def forward(self, batch):
        x = batch["spatial_features_2d"]
        cls_preds, box_preds = (
            conv(x).permute(0, 2, 3, 1).contiguous() for conv in (self.conv_cls, self.conv_box))
        self.forward_ret_dict["cls_preds"] = cls_preds
        batch["batch_cls_preds"], batch["batch_box_preds"] = self.generate_predicted_boxes(
            batch["batch_size"], cls_preds=cls_preds, box_preds=box_preds)
        return batch


class CenterHead(nn.Module):
    def __init__(self, classes, low, size):
        super().__init__()
        self.conv, self.low, self.size = nn.Conv2d(16, classes, 1), low, size
        self.predict_boxes_when_training = True

    def generate_predicted_boxes(self, batch_size, pred_dicts):
        scores, cells = pred_dicts[0]["hm"].flatten(1).sigmoid().topk(7)
        labels, places = cells // 256, cells % 256
        boxes = torch.zeros(batch_size, 7, 9)
        boxes[..., 0] = places % 16 * self.size[0] + self.low[0]
        boxes[..., 3:7] = torch.tensor([4.0, 2, 1.5, 7])
        boxes[..., 7:] = torch.tensor([1.0, -1.0]).cuda()
        return [{"pred_boxes": b, "pred_scores": s, "pred_labels": n + 1}
                for b, s, n in zip(boxes, scores, labels)]

    def forward(self, batch):
        found = self.generate_predicted_boxes(
            batch["batch_size"], [{"hm": self.conv(batch["spatial_features_2d"])}])
        if self.predict_boxes_when_training:
            batch["rois"] = found[0]["pred_boxes"]
        else:
            batch["final_box_dicts"] = found
        return batch


class OtherHead(nn.Module):
    def __init__(self, *sizes):
        super().__init__()


class Net(Detector3DTemplate, nn.Module):
    def __init__(self, config, classes, dataset):
        super().__init__()
        features = dataset.point_feature_encoder.num_point_features
        low, size = dataset.point_cloud_range[:3], dataset.voxel_size
        self.model_cfg = EasyDict(config)
        self.vfe = (DynMeanVFE(low, size, dataset.grid_size)
                    if config.VFE.NAME == "DynMeanVFE" else MeanVFE())
        self.backbone_3d = Backbone(features, dataset.grid_size)
        self.map_to_bev_module, self.backbone_2d, self.pfe = HeightCompression(), Bev(), None
        kinds = {"AnchorHead": AnchorHead, "CenterHead": CenterHead, "OtherHead": OtherHead}
        kind = kinds[config.DENSE_HEAD.NAME]
        self.dense_head = kind(classes, low, size)
        self.register_buffer("global_step", torch.zeros(1, dtype=torch.int64))

    def forward(self, batch):
        for part in (self.vfe, self.backbone_3d, self.map_to_bev_module, self.backbone_2d,
                     self.dense_head):
            batch = part(batch)
        return batch


def build_network(model_cfg, num_class, dataset):
    return Net(model_cfg, num_class, dataset)
""",
    "tools/cfgs/dataset_configs/own.yaml": """
DATASET: KittiDataset
POINT_CLOUD_RANGE: [-25.6, -25.6, -4, 25.6, 25.6, 4]
POINT_FEATURE_ENCODING: {used_feature_list: [x, y, z, intensity]}
DATA_PROCESSOR:
  - NAME: mask_points_and_boxes_outside_range
  - NAME: transform_points_to_voxels
    VOXEL_SIZE: [3.2, 3.2, 2.0]
    MAX_POINTS_PER_VOXEL: 5
    MAX_NUMBER_OF_VOXELS: {train: 10, test: 300}
""",
    "tools/cfgs/own_models/anchors.yaml": """
CLASS_NAMES: [Car, Cyclist]
DATA_CONFIG:
  _BASE_CONFIG_: cfgs/dataset_configs/own.yaml
MODEL:
  NAME: SECONDNet
  VFE: {NAME: MeanVFE}
  BACKBONE_3D: {NAME: VoxelBackBone8x}
  DENSE_HEAD: {NAME: AnchorHead}
""",
    "tools/cfgs/own_models/centers.yaml": """
_BASE_CONFIG_: cfgs/own_models/anchors.yaml
DATA_CONFIG:
  DATASET: WaymoDataset
  POINT_FEATURE_ENCODING: {used_feature_list: [x, y, z, intensity, elongation]}
MODEL:
  VFE: {NAME: DynMeanVFE}
  DENSE_HEAD: {NAME: CenterHead}
  ROI_HEAD: {NAME: OwnHead}
""",
}


def write(folder: Path) -> Path:
    """A checkout in the folder."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip(), encoding="utf-8")
    return folder
