"""Voxels in standard operators: functions of a file that find, gather and sum them."""
