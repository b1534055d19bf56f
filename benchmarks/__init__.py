"""Time this project and its peers on one machine, in alternation. Run from the repository's root:

python -m benchmarks.training_step    a training step against torch.nn.Transformer
python -m benchmarks.decoding         translating against transformers' MarianMTModel and CTranslate2
python -m benchmarks.input_pipeline   batches made against batches that training consumes
python -m benchmarks.batching         training on packed against bucketed batches
python -m benchmarks.variants         choices of the training step against its defaults
python -m benchmarks.startup          imports, time to the first step, peak memory
python -m benchmarks.gpu_all          all that needs a GPU, within 10 minutes
python -m benchmarks.report           the tables and the plot of docs/log/benchmarks.md from benchmarks/results/*.jsonl

Each prints one JSON line for each figure, and appends it to the file that `--output` names.
"""
