"""What people who come from other programs write, and what it is called here.

A word is looked up as a recipe's key, a flag or a word of a plan, whatever dashes, section and case it is written with:
`--nproc-per-node`, `train.epochs` and `DDP` are `nproc_per_node`, `epochs` and `ddp`.
"""

from collections.abc import Mapping

_RANKS = 'the plan says how many processes there are: --plan "dp=4" starts four'
_MICROS = 'micro-batches of a step are a word of the plan: --plan "dp=2 micros=4"'
_STEPS = "train.steps; an epoch has (samples / train.global_batch) steps"
_BATCH = (
    "train.global_batch, the samples of one step over all ranks, and train.micro_batch, those of one pass"
)
_MIXED = 'the plan says in what is computed: --plan "precision=bf16"; also fp16, and bf16:fp8 for products in 8 bits'
_RECOMPUTE = 'the plan says what is computed again: --plan "recompute=full", selective or auto'
_TRACKERS = (
    'out.track = ["mlflow"]: tensorboard, wandb, mlflow, trackio, csv, or a sink of your own, FILE.py:NAME'
)
_FILE = "the recipe stands there without a flag: unisono train FILE.toml"
_SCREEN = "nothing: progress is shown unless --quiet is said, and all of it is in the run folder's events/"
_SHARDED = 'a word of the plan: --plan "shard=4 zero=3" (zero=1: optimiser alone, 2: gradients too, 3: parameters too)'
_HOSTS = "--hosts a,b,c names the hosts, and the plan how many ranks there are"
_OUT = "out.dir: --out.dir FOLDER"

# Each remedy, and the words that it answers.
_ANSWERS: Mapping[str, str] = {
    _RANKS: (
        "gpus devices num_gpus ngpus n_gpus nproc nproc_per_node num_processes world_size world np n "
        "local_world_size procs data_parallel_size dp_size ddp data_parallel accelerator strategy "
        "distributed distributed_type"
    ),
    _MICROS: (
        "gradient_accumulation_steps accumulate_grad_batches gradient_accumulation grad_accum "
        "grad_accumulation accumulation_steps grad_acc_steps num_micro_batches num_microbatches"
    ),
    _STEPS: (
        "epochs epoch num_epochs n_epochs num_train_epochs max_epochs max_steps num_steps n_steps "
        "train_iters max_iters iterations iters total_steps"
    ),
    _BATCH: (
        "batch_size batch train_batch_size per_device_train_batch_size per_device_batch_size "
        "local_batch_size bs micro_batch_size global_batch_size train_micro_batch_size_per_gpu"
    ),
    _MIXED: (
        "mixed_precision amp fp16 bf16 half fp8 tf32 autocast torch_dtype compute_dtype precision fp32 fp64"
    ),
    _RECOMPUTE: (
        "gradient_checkpointing activation_checkpointing recompute_granularity checkpoint_activations"
    ),
    _TRACKERS: "wandb tensorboard mlflow trackio report_to logger neptune comet comet_ml clearml aim",
    _FILE: "c config config_file cfg recipe f file",
    _SCREEN: "verbose v vv debug log_level loglevel log_interval logging_steps log_every log_every_n_steps",
    _SHARDED: "fsdp fsdp2 zero zero1 zero2 zero3 zero_stage hsdp deepspeed full_shard fully_shard stage3",
    _HOSTS: "nnodes nodes num_nodes n_nodes num_machines hostfile node_rank",
    _OUT: "output output_dir o out out_dir save_dir default_root_dir logdir log_dir run_dir",
    'a word of the plan: --plan "tp=2"': (
        "tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size megatron"
    ),
    'a word of the plan: --plan "pp=2"': (
        "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size gpipe"
    ),
    'a word of the plan: --plan "cp=2"': (
        "context_parallel context_parallel_size sequence_parallel sp cp_size ring ulysses"
    ),
    'a word of the plan: --plan "shard=2 ep=2"': (
        "expert_parallel expert_parallel_size expert_model_parallel_size ep_size"
    ),
    "train.lr: --train.lr 3e-4": "learning_rate",
    "train.clip, the largest norm of the gradient": (
        "max_grad_norm clip_grad grad_clip gradient_clip_val clip_grad_norm gradient_clipping"
    ),
    "train.warmup_steps": "warmup lr_warmup_steps warmup_iters warmup_ratio",
    "model.context, in tokens": (
        "seq_len seq_length sequence_length max_seq_len max_length block_size context_length"
    ),
    "model.n_layer, model.n_head and model.d_model give a model's size": (
        "num_layers n_layers num_hidden_layers depth num_heads num_attention_heads hidden_size n_embd dim "
        "embed_dim width"
    ),
    "train.compile = true": "torch_compile use_compile compile_model",
    "--resume RUN goes on with a run": (
        "resume_from_checkpoint resume_from load_checkpoint ckpt_path load checkpoint restart"
    ),
    "train.save_every, and train.keep": (
        "save_steps save_interval checkpoint_interval save_strategy save_total_limit"
    ),
    "train.eval_every": "eval_steps eval_interval val_check_interval evaluation_strategy eval_strategy",
    "[launch] backend": "ddp_backend dist_backend process_group_backend",
    "seed": "random_seed manual_seed rng_seed random_state",
    "ranks use what the machine has; CUDA_VISIBLE_DEVICES= hides its GPUs": (
        "cpu no_cuda use_cpu device cuda gpu"
    ),
}
_REMEDIES: Mapping[str, str] = {word: remedy for remedy, words in _ANSWERS.items() for word in words.split()}


def remedy_for(word: str) -> str:
    """What is written here in the place of another program's word; "" where it is not known.

    `remedy_for("--nproc-per-node")` says that the plan counts the processes."""
    leaf = word.partition("=")[0].rpartition(".")[2]
    return _REMEDIES.get(leaf.strip("-").replace("-", "_").lower(), "")
