"""Pipeline training of LLaMA-8B and Qwen2-7B over two islands, with any communication library at the border and inside.

`shapes` has the two models' sizes and what they cost, `model` the modules, `stage` one pipeline stage with its optimizer,
`links` the libraries, `balance` the layers of each stage, `training` the loop, `records` what it writes. Text and the cutting
of the model into parts are those of `llama`. Begin at `training.Training.run`; the command line is `examples/paper.py`.
"""
