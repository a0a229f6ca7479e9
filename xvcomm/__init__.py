"""Collectives and pipelines for jobs that mix NVIDIA GPUs, AMD GPUs and host memory."""
