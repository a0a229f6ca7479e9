"""Adapters to frameworks: one folder or file each."""

if __name__ != "xvcomm.adapters":
    raise ImportError("import xvcomm.adapters, not adapters: this folder is a part of the package xvcomm")
