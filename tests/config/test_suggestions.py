"""Hints: what to write instead of a key or an option that there is not. Each, followed, composes."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from prl.base.errors import ConfigError
from prl.config.compose import compose, options
from prl.config.counterparts import table
from prl.config.suggestions import hint, keys_of, override_key
from prl.launch.command import composed
from prl.launch.components import build_components

PAGE = Path(__file__).parents[2] / "prl" / "FROM_TRL_AND_VERL.md"
JSONL = "env=jsonl envs.jsonl.args.path"
EXTERNAL = "algo=opd teacher=endpoint teacher.name=my-model teacher.base_url=http://127.0.0.1:8001/v1"
OPTIONS = options()
PPO = "loss=ppo loss.clip_low=0.2 loss.clip_high=0.2"
OF_OTHERS = {
    # TRL: GRPOConfig, SFTConfig, GKDConfig, ModelConfig; and TrainingArguments of transformers
    "model_name_or_path=Qwen/Qwen3-0.6B": "model=hf model.path=Qwen/Qwen3-0.6B",
    "torch_dtype=bfloat16": "model.dtype=bfloat16 trainer.dtype=bfloat16",
    "bf16=true": "model.dtype=bfloat16 trainer.dtype=bfloat16",
    "bf16=False": "model.dtype=float32 trainer.dtype=float32",
    "output_dir=out/a": "run.dir=out/a",
    "run_name=a": "run.name=a",
    "resume_from_checkpoint=true": "run.resume=auto",
    "report_to=wandb": "monitor=wandb",
    "report_to=all": "monitor=console",
    "report_to=[wandb]": "monitor=[wandb]",
    "nnodes=1": "launcher=local",
    "n-samples-per-prompt=8": "orchestrator.group_size=8",
    "lora_target_modules=q_proj": "model.lora.rank=16 model.lora.target_modules=[q_proj]",
    "rollout.val_kwargs.do_sample=true": "orchestrator.eval.sampling.temperature=1",
    "algo=reinforce++": "algo=reinforce_pp",
    "save_steps=50": "checkpoint.every=50",
    "save_total_limit=3": "checkpoint.keep_last=3",
    "save_strategy=steps": "checkpoint.every=50",
    "load_best_model_at_end=true": "orchestrator.eval.keep_best=true",
    "eval_steps=10": "orchestrator.eval.every=10",
    "eval_strategy=no": "orchestrator.eval.every=null",
    "num_train_epochs=3": "max_steps=200",
    "per_device_train_batch_size=8": "orchestrator.batch_size=256",
    "gradient_accumulation_steps=4": "trainer.tokens_per_forward=4096",
    "steps_per_generation=4": "trainer.updates_per_batch=4",
    "num_iterations=2": "trainer.epochs=2",
    "num_generations=8": "orchestrator.group_size=8",
    "generation_batch_size=64": "orchestrator.batch_size=64",
    "learning_rate=1e-5": "trainer.optim.lr=1e-5",
    "args.learning_rate=1e-5": "trainer.optim.lr=1e-5",
    "trainer.optim.beta=0.9": "trainer.optim.betas=[0.9,0.95]",
    "weight_decay=0.01": "trainer.optim.weight_decay=0.01",
    "adam_beta1=0.9": "trainer.optim.betas=[0.9,0.95]",
    "adam_beta2=0.99": "trainer.optim.betas=[0.9,0.99]",
    "adam_epsilon=1e-8": "trainer.optim.eps=1e-8",
    "max_grad_norm=0.5": "trainer.max_grad_norm=0.5",
    "lr_scheduler_type=cosine": "schedule=cosine",
    "lr_scheduler_type=polynomial": "schedule=constant",
    "warmup_ratio=0.1": "trainer.schedule.warmup_steps=10",
    "warmup_steps=5": "trainer.schedule.warmup_steps=5",
    "gradient_checkpointing=true": "trainer.gradient_checkpointing=full",
    "torch_compile=true": "trainer.compile=true",
    "use_cpu=true": "trainer.device=cpu engine.device=cpu",
    "fsdp=full_shard": "trainer.num_processes=2",
    "deepspeed=zero3.json": "trainer.num_processes=2",
    "use_peft=true": "model.lora.rank=16",
    "lora_r=8": "model.lora.rank=8",
    "lora_alpha=16": "model.lora.rank=16 model.lora.alpha=16",
    "target_modules=[q_proj,v_proj]": "model.lora.rank=16 model.lora.target_modules=[q_proj,v_proj]",
    "lora_target_modules=all-linear": "model.lora.rank=16",
    "beta=0.04": "algo.kl.coef=0.04",
    "epsilon=0.2": PPO,
    "epsilon_high=0.28": "loss=ppo loss.clip_high=0.28",
    "delta=2": "loss=default loss.delta=2",
    "loss_type=dapo": "loss.agg_mode=token_mean",
    "loss_type=dr_grpo": "loss.agg_mode=constant loss.constant_length=1024",
    "importance_sampling_level=sequence": "loss=gspo",
    "scale_rewards=group": "algo.normalize=std",
    "scale_rewards=false": "algo.normalize=null",
    "mask_truncated_completions=true": "algo.mask_truncated=true",
    "sync_ref_model=true": "algo.kl.reference=lagged",
    "temperature=0.7": "sampling.temperature=0.7",
    "top_p=0.9": "orchestrator.eval.sampling.top_p=0.9",
    "max_completion_length=64": "sampling.max_tokens=64",
    "max_prompt_length=512": "model.max_model_len=4096",
    "max_length=1024": "model.max_model_len=1024",
    "use_vllm=true": "engine=default",
    "use_vllm=false": "engine=transformers",
    "vllm_mode=colocate": "engine=default",
    "vllm_gpu_memory_utilization=0.3": "engine.gpu_memory_utilization=0.3",
    "vllm_tensor_parallel_size=2": "engine.tensor_parallel_size=2",
    "vllm_server_host=0.0.0.0": "engine.urls=[http://127.0.0.1:8001]",
    "vllm_importance_sampling_cap=2": "loss=reinforce loss.correction=tis loss.correction_cap=2",
    "environment_factory=my_shop.Shop": "env=tools envs.tools.args.env=my_shop.Shop",
    "reward_funcs=[a]": f"{JSONL}=data.jsonl envs.jsonl.args.grader=my_graders.score",
    "dataset_name=me/sums": f"{JSONL}=hub:me/sums:train",
    "shuffle_dataset=false": "curriculum.shuffle=false",
    "teacher_model_name_or_path=Qwen/Qwen3-8B": "algo=opd teacher.model.path=Qwen/Qwen3-8B",
    "use_uld_loss=true": "algo=opd algo.align=text",
    "seq_kd=true": "algo=sft",
    "early_stopping_patience=3": "orchestrator.stop.patience=3",
    "trust_remote_code=true": "model.trust_remote_code=true",
    # verl
    "data.train_files=train.parquet": f"{JSONL}=train.parquet",
    "data.val_files=test.parquet": f"{JSONL}=train.jsonl envs.jsonl.args.eval_path=test.parquet",
    "data.train_batch_size=128": "orchestrator.batch_size=256",
    "data.max_response_length=512": "sampling.max_tokens=512",
    "data.prompt_key=question": f"{JSONL}=data.jsonl envs.jsonl.args.prompt_key=question",
    "data.shuffle=false": "curriculum.shuffle=false",
    "actor_rollout_ref.model.path=/models/a": "model.path=/models/a",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true": "trainer.gradient_checkpointing=full",
    "actor_rollout_ref.actor.optim.lr=1e-6": "trainer.optim.lr=1e-6",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=5": "trainer.schedule.warmup_steps=5",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64": "trainer.updates_per_batch=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8": "trainer.tokens_per_forward=4096",
    "actor_rollout_ref.actor.ppo_epochs=2": "trainer.epochs=2",
    "actor_rollout_ref.actor.freeze_vision_tower=true": "model.freeze=[visual]",
    "actor_rollout_ref.actor.grad_clip=1": "trainer.max_grad_norm=1",
    "actor_rollout_ref.actor.clip_ratio=0.2": PPO,
    "actor_rollout_ref.actor.clip_ratio_c=3": "loss=ppo loss.dual_clip=3",
    "actor_rollout_ref.actor.entropy_coeff=0.01": "loss.entropy_coef=0.01",
    "actor_rollout_ref.actor.use_kl_loss=true": "algo.kl.coef=0.001",
    "actor_rollout_ref.actor.kl_loss_coef=0.01": "algo.kl.coef=0.01",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean": "loss.agg_mode=sequence_mean",
    "actor_rollout_ref.actor.policy_loss.loss_mode=gspo": "loss=gspo",
    "actor_rollout_ref.actor.fsdp_config.param_offload=true": "trainer.cpu_offload=true",
    "actor_rollout_ref.ref.fsdp_config.param_offload=true": "trainer.cpu_offload=true",
    "actor_rollout_ref.rollout.n=8": "orchestrator.group_size=8",
    "rollout.n=8": "orchestrator.group_size=8",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2": "engine.tensor_parallel_size=2",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6": "engine.gpu_memory_utilization=0.6",
    "actor_rollout_ref.rollout.name=vllm": "engine=default",
    "actor_rollout_ref.rollout.temperature=1": "sampling.temperature=1",
    "actor_rollout_ref.rollout.val_kwargs.n=4": "orchestrator.eval.k=4",
    "algorithm.adv_estimator=grpo": "algo=grpo",
    "algorithm.adv_estimator=rloo": "algo.baseline=leave_one_out",
    "algorithm.norm_adv_by_std_in_grpo=false": "algo.normalize=null",
    "algorithm.kl_ctrl.kl_coef=0.001": "algo.kl.coef=0.001",
    "algorithm.filter_groups.enable=true": "curriculum=odf",
    "custom_reward_function.path=r.py": f"{JSONL}=data.jsonl envs.jsonl.args.grader=my_graders.score",
    "reward_model.enable=true": "env=judge envs.judge.args.path=data.jsonl",
    "trainer.total_epochs=15": "max_steps=200",
    "trainer.total_training_steps=100": "max_steps=100",
    "trainer.n_gpus_per_node=8": "trainer.num_processes=2 engine.servers=2",
    "trainer.nnodes=2": "launcher=ray",
    "trainer.save_freq=20": "checkpoint.every=20",
    "trainer.test_freq=5": "orchestrator.eval.every=5",
    "trainer.project_name=p": "monitor=wandb monitor.wandb.project=p",
    "trainer.experiment_name=e": "run.name=e",
    "trainer.logger=[console,wandb]": "monitor=[console,wandb]",
    "trainer.default_local_dir=out": "run.dir=out",
    "trainer.resume_mode=auto": "run.resume=auto",
    # OpenRLHF
    "pretrain=meta/llama": "model=hf model.path=meta/llama",
    "actor_learning_rate=5e-7": "trainer.optim.lr=5e-7",
    "micro_train_batch_size=8": "trainer.tokens_per_forward=4096",
    "rollout_batch_size=1024": "orchestrator.batch_size=256",
    "n_samples_per_prompt=8": "orchestrator.group_size=8",
    "max_epochs=1": "trainer.epochs=1",
    "generate_max_len=1024": "sampling.max_tokens=1024",
    "init_kl_coef=0.01": "algo.kl.coef=0.01",
    "eps_clip=0.2": PPO,
    "advantage_estimator=reinforce": "algo=reinforce_pp",
    "vllm_num_engines=2": "engine.servers=2",
    "zero_stage=3": "trainer.num_processes=2",
    "adam_offload=true": "trainer.cpu_offload=true",
    "prompt_data=data.jsonl": f"{JSONL}=data.jsonl",
    "label_key=solution": f"{JSONL}=data.jsonl envs.jsonl.args.answer_key=solution",
    "save_path=ckpt": "run.dir=ckpt",
    # prime-rl, newer and older
    "training_mode=opd": "algo=opd",
    "training_mode=rl": "algo=grpo",
    "orchestrator.training_mode=sft": "algo=sft",
    "orchestrator.algo.type=max_rl": "algo=max_rl",
    "algo.type=grpo": "algo=grpo",
    "algo.loss=ppo": "loss=ppo",
    "algo.roles.tool.alpha=0.25": "algo=echo +algo.roles.tool.alpha=0.25",
    "orchestrator.algo.roles.user.alpha=0.05": "algo=echo +algo.roles.user.alpha=0.05",
    "orchestrator.algo.length_penalty.type=tokens": "algo.length_penalty=tokens",
    "orchestrator.algo.teacher.name=t": "algo=opd algo.teacher.name=t",
    "orchestrator.algo.demo_key=answer": "algo=opsd algo.demo_key=answer",
    "orchestrator.advantage.type=default": "algo=grpo",
    "advantage.import_path=m.f": "algo=custom algo.fn._target_=m.f",
    "orchestrator.teacher.model.name=t": EXTERNAL,
    "orchestrator.filters.gibberish.enforce=true": "filters=enforce_post",
    "orchestrator.post_batch_filters=[]": "filters=enforce_post",
    "orchestrator.pre_batch_filters.0.type=repetition": "filters=enforce",
    "orchestrator.buffer.online_difficulty_filtering=true": "curriculum.online_difficulty_filtering=true",
    "buffer.easy_threshold=0.9": "curriculum=pools curriculum.easy_threshold=0.9",
    "orchestrator.rollouts_per_example=8": "orchestrator.group_size=8",
    "orchestrator.sampling.temperature=0.8": "sampling.temperature=0.8",
    "orchestrator.train.sampling.max_tokens=64": "sampling.max_tokens=64",
    "orchestrator.eval.interval=10": "orchestrator.eval.every=10",
    "orchestrator.renderer.name=auto": "renderer.name=auto",
    "orchestrator.client.base_url=[http://a/v1]": "engine.urls=[http://127.0.0.1:8001]",
    "trainer.max_async_level=2": "orchestrator.max_async_level=2",
    "trainer.loss.type=custom": "loss=aipo",
    "trainer.loss.kl_tau=0.01": "loss.kl_tau=0.01",
    "trainer.loss.import_path=m.f": "loss=custom loss._target_=m.f",
    "trainer.optim.type=muon": "optim=muon",
    "trainer.scheduler.type=cosine": "schedule=cosine",
    "trainer.model.seq_len=512": "model.max_model_len=512",
    "trainer.ckpt.interval=10": "checkpoint.every=10",
    "inference.parallel.tp=2": "engine.tensor_parallel_size=2",
    "inference.gpu_memory_utilization=0.7": "engine.gpu_memory_utilization=0.7",
    "inference.server.port=8000": "engine.port=8000",
    "model.name=Qwen/Qwen3-0.6B": "model=hf model.path=Qwen/Qwen3-0.6B",
    "wandb.project=p": "monitor=wandb monitor.wandb.project=p",
}
"""Overrides with keys of other projects, and what a hint has in their place."""
OF_PRL = {
    "trainer.optm.lr=1e-5": "trainer.optim.lr=1e-5",
    "trainer.optim.lrr=3": "trainer.optim.lr=3",
    "optim.lr=3": "trainer.optim.lr=3",
    "trainer.lr=3": "trainer.optim.lr=3",
    "orchestrator.bach_size=64": "orchestrator.batch_size=64",
    "orchestrator_batch_size=64": "orchestrator.batch_size=64",
    "orchestrator.group-size=4": "orchestrator.group_size=4",
    "orchestator.eval.every=5": "orchestrator.eval.every=5",
    "eval.every=5": "orchestrator.eval.every=5",
    "trainer.gradient_checkpoint=full": "trainer.gradient_checkpointing=full",
    "trainer.epoch=2": "trainer.epochs=2",
    "max_stepz=3": "max_steps=3",
    "max-steps=3": "max_steps=3",
    "checkpoint.keep_lst=3": "checkpoint.keep_last=3",
    "sampling.temprature=0.5": "sampling.temperature=0.5",
    "model.lora.rnk=8": "model.lora.rank=8",
    "algo.normalise=std": "algo.normalize=std",
    "kl.coef=0.1": "algo.kl.coef=0.1",
    "loss.correctoin=icepop": "loss.correction=icepop",
    "engine.tensor_paralel_size=2": "engine.tensor_parallel_size=2",
    "teacher.max_model_len=64": "teacher.model.max_model_len=64",
    "envs.mth.args.split=eval": "envs.math.args.split=eval",
    "envs.math.agrs.max_operand=9": "envs.math.args.max_operand=9",
    "envs.math.group_sise=4": "envs.math.group_size=4",
    "envs.gsm8k.args.path=x.jsonl": "env=gsm8k envs.gsm8k.args.path=x.jsonl",
    "envs.judge.args.rubric=short": "env=judge envs.judge.args.path=my_path envs.judge.args.rubric=short",
    "loss.dual_clip=3": "loss=ppo loss.dual_clip=3",
    "loss.clip_low=0.1": "loss=ppo loss.clip_low=0.1",
    "algo.divergence=jsd": "algo=opd algo.divergence=jsd",
    "trainer.optim.momentum=0.9": "optim=sgd trainer.optim.momentum=0.9",
    "launcher.nodes=2": "launcher=slurm launcher.nodes=2",
    "monitor.wandb.project=x": "monitor=wandb monitor.wandb.project=x",
    "engine.args.block-size=16": "+engine.args.block-size=16",
    "~filters.post_batch.giberish": "~filters.post_batch.gibberish",
    "~monitor.consol": "~monitor.console",
    "algo=gpro": "algo=grpo",
    "los=ppo": "loss=ppo",
    "algo=dapo": "experiment=dapo",
    "loss=grpo": "algo=grpo loss=ppo",
    "engine.url=http://a:8001": "engine.urls=[http://a:8001]",
    "trainer.optim.beta2=0.99": "trainer.optim.betas=[0.9,0.99]",
    "rollout.top_k=-1": "orchestrator.eval.sampling.top_k=0",
    "loss=pppo": "loss=ppo",
    "renderer=glm5": "renderer=glm-5",
    "env=[math,revers_text]": "env=[math,reverse_text]",
    "+algo@envs.math.algo=opdd": "+algo@envs.math.algo=opd",
    "model.path=s/lr=1,seed=0/x": """model.path="s/lr=1,seed=0/x\"""",
}
"""Misspelt overrides, those behind a part too few, and those of options that were not chosen."""
REASONS = [
    "lora_dropout=0.1", "load_in_4bit=true", "attn_implementation=flash_attention_2", "logging_steps=10",
    "critic.optim.lr=1e-5", "algorithm.gamma=1", "algorithm.lam=0.95", "packing=true",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "report_to=none", "push_to_hub=true",
    "rollout.enforce_eager=true", "repetition_penalty=1.1", "neftune_noise_alpha=5",
]  # fmt: skip
SILENT = [
    "foo.n=1", "rollout.epochs=3", "foo.every=1", "x.alpha=1", "n=4", "epochs=3", "every=5", "alpha=0.1", "k=4",
    "sampling.n=4", "engine.n=2", "orchestrator.eval.n=2", "checkpoint.epochs=3", "trainer.every=5", "foo.lr=1",
    "foo.learning_rate=1", "envs.math.args.learning_rate=1", "envs.math.args.foo=1",
    "envs.foo.args.split=eval", "qqq.zzz=1", "loss=zzzzz", "max_steps=3", "algo=opd", "+algo@envs.b.algo=opd",
    'model.path="a=b"', "~trainer.optm", "+engine.args.block-size=16", "+algo.fn.eps=1", "seed=1", "lrn=3", "sede=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def config():
    return composed([], OPTIONS)


def overrides_in(text: str) -> list[str]:
    """The overrides that a hint has one write."""
    if (quoted := re.search(r"'(\S+=\".*\")'", text)) is not None:
        return [quoted[1]]
    said = text.partition(": ")[2]
    return [each.rstrip("?") for each in re.findall(r"(?:\+|~)?\b[\w.@-]+=[^\s?]+|~[\w.]+", said)]


def chooses(override: str) -> bool:
    """Whether an override chooses an option of a group."""
    return re.split("[@=]", override.lstrip("+"))[0] in OPTIONS


def commands(rows: list[list[str]]) -> list[list[str]]:
    """All of these overrides in fewer lists: beside the default options, and where options differ what is unrelated."""
    packs: list[dict[str, dict[str, str]]] = [{}]  # the overrides by their keys, by the keys' first part
    for overrides in rows:
        by_root: dict[str, dict[str, str]] = {}
        for override in overrides:
            key = override.lstrip("+").split("=")[0]
            root = re.split("[@.]", key)[0]
            root = {"env": "envs", "optim": "trainer", "schedule": "trainer"}.get(root, root)
            by_root.setdefault(root, {})[key] = override
        if not any(map(chooses, overrides)):
            for root, named in by_root.items():
                packs[0].setdefault(root, {}).update(named)
        elif (pack := next((pack for pack in packs[1:] if not pack.keys() & by_root.keys()), None)) is not None:
            pack |= by_root
        else:
            packs.append(by_root)
    return [[override for named in pack.values() for override in named.values()] for pack in packs]


def sensible(word: str, text: str, config) -> str:
    """A word with a value that its counterpart can have: the present one, an option of the group, or a number."""
    meant = re.search(r"([\w.]+)=(\[?)\{value\}", text)
    if meant is None or "=" in word:
        return word if "=" in word else f"{word}=true"
    if meant[1] in OPTIONS:
        usable = [option for option in OPTIONS[meant[1]] if option != "tools"]  # which needs a class
        return f"{word}={usable[-1]}"
    present = OmegaConf.select(config, meant[1], throw_on_resolution_failure=False)
    wanted = "[q_proj]" if meant[1].endswith("target_modules") else 8
    value = 0.5 if meant[2] else wanted if present is None else present
    return f"{word}={value}".replace(" ", "")


@pytest.mark.parametrize(("argument", "meant"), [*OF_OTHERS.items(), *OF_PRL.items()])
def test_a_hint_has_the_overrides_to_write(config, argument, meant):
    text = hint(argument, config, OPTIONS)
    assert "\n" not in text and overrides_in(text) == meant.split()


def test_what_hints_say_composes():
    for overrides in commands([text.split() for text in (OF_OTHERS | OF_PRL).values()]):
        compose(overrides)


def test_every_word_of_the_table_has_a_hint_that_composes(config):
    words = [sensible(word, text, config) for word, text in table()["words"].items()]
    hints = {word: hint(word, config, OPTIONS) for word in words}
    assert len(words) > 400 and [word for word, text in hints.items() if text is None] == []
    for overrides in commands([overrides_in(text) for text in hints.values()]):
        compose(overrides)


@pytest.mark.parametrize("argument", REASONS)
def test_a_word_without_a_counterpart_has_a_reason(config, argument):
    text = hint(argument, config, OPTIONS)
    assert text.startswith(f"prl has no {argument.split('=')[0].split('.optim')[0]}; ") and "=" not in text


@pytest.mark.parametrize("argument", SILENT)
def test_what_is_there_or_like_nothing_has_no_hint(config, argument):
    assert hint(argument, config, OPTIONS) is None


def test_no_key_that_there_is_has_another_in_its_place(config):
    assert not set(table()["words"]) & set(keys_of(config))


def page_rows() -> list[list[str]]:
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return lines[1:]


def test_the_page_of_other_names_says_what_hints_say(config):
    """Each name of the first two columns has a hint with a key of the third, or is prl's own."""
    keys: dict[str, set[str]] = {}
    for of_trl, of_verl, of_prl in page_rows():
        for name in re.findall("`([^`]+)`", of_trl + of_verl):
            keys.setdefault(name.rpartition(".")[2], set()).update(
                re.findall(r"[\w.]+", " ".join(re.findall("`([^`]+)`", of_prl)))
            )
    names = re.findall("`([^`]+)`", " ".join(row[0] + row[1] for row in page_rows()))
    assert len(names) > 60
    for name in names:
        own = keys[name.rpartition(".")[2]]
        text = hint(name if "=" in name else f"{name}=8", config, OPTIONS)
        said = {override.lstrip("+").split("=")[0] for override in overrides_in(text or "")}
        assert said & own or name in keys_of(config), f"{name}: the hint is {text!r}, the page has {own}"


@pytest.mark.parametrize("command", ["eval", "serve"])
def test_a_hint_names_keys_of_the_command_alone(command):
    config = composed([], OPTIONS, command)
    assert hint("learning_rate=1", config, OPTIONS) is None
    assert overrides_in(hint("max_model_len=64", config, OPTIONS)) == ["model.max_model_len=64"]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning_rate=1e-5", "trainer.optim.lr=1e-05"),
        ("orchestrator.training_mode=opd", "algo=opd"),
        ("algo.roles.tool.alpha=0.2", "algo=echo +algo.roles.tool.alpha=0.1"),
        ("orchestrator.bach_size=8", "orchestrator.batch_size"),
        ("model.lora.rnk=8", "model.lora.rank"),
    ],
)
def test_an_added_key_has_the_hint_in_its_refusal(key, meant):
    with pytest.raises(ConfigError, match=re.escape(meant)):
        build_components(compose([f"+{key}"]))


@pytest.mark.parametrize(
    ("argument", "key"), [("a.b=c=d", "a.b"), ("+a@b.c=1", "a@b.c"), ("++a=1", "a"), ("~a.b", "a.b")]
)
def test_the_key_of_an_override(argument, key):
    assert override_key(argument) == key
