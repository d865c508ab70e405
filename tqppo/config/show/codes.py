"""What each diagnostic code means, for `tqppo explain CODE` and `docs/troubleshooting.md`."""

from __future__ import annotations

MEANINGS: dict[str, str] = {
    # files and layers
    "E001": "A config file is not there. Presets are named with --preset, files with --config.",
    "E002": "A folder was named where a config file is expected. Name a file in it.",
    "E003": "A config file cannot be read. Look at its permissions.",
    "E004": "A config file is not UTF-8 text. Save it as UTF-8.",
    "E005": "A config file has more than 1 MiB. It is probably a dataset: name it in data.train.",
    "E006": "A line is not TOML. Strings need quotes, true and false are lower case, a key is set once.",
    "E007": "Tables are nested more deeply than a config has sections and keys.",
    "W008": "A config file sets nothing: it is empty or holds only comments.",
    "E009": "There is no preset of this name. `tqppo presets list` shows them.",
    "E010": "Files extend each other in a circle.",
    "E011": "`extends` is the name of a preset or file, or a list of names.",
    "E012": "An override is not key=value, or its value is not TOML. Quote lists and tables for the shell.",
    "W013": "A variable such as TQPPO_ACTOR_LR sets nothing: names of settings have two underscores, TQPPO__ACTOR__LR.",
    "E014": "A config is made of more than 100 files, each file counted as often as another one extends it.",
    "E015": "There are more than 200 problems: this is probably no config. The settings after them were not looked at.",
    # keys and values
    "E101": "There is no such key. It is misspelt, or belongs to another section; `tqppo schema` has all of them.",
    "E102": "The key is another tool's, or was removed. The message says what tqppo calls it.",
    "E103": "The value has the wrong type. Numbers have no quotes; 2.0 is not a whole number.",
    "E104": "The value is none of those that the setting allows. `tqppo config explain KEY` lists them.",
    "E105": "The number is out of the setting's range.",
    "E106": "A setting without a default is missing: a teacher needs a path.",
    "E107": "A section was set to a single value. Write [section] and its keys below it.",
    "E108": "A value cannot be used: a control character, a path that no file can have, a number of more than 64 bits.",
    # batches and lengths
    "E201": "Rows of a mini-batch (prompts × sessions) cannot be shared evenly by the ranks.",
    "E202": "A mini-batch has more prompts than the batch.",
    "W203": "Padding rows make up more than half of a step: ranks and mini-batches have a large common multiple.",
    "E204": "The estimator compares the sessions of a prompt, and there is only one. Raise rollout.group_size.",
    "W205": "Some rows of every step are padding, because the batch is no multiple of ranks and mini-batches.",
    "E206": "Prompt and response together may be longer than rollout.max_context_tokens.",
    "E207": "Prompt and response together may be longer than the model's context.",
    "E208": "One row may have more tokens than a forward takes. Raise micro_batch_tokens.",
    "E209": "The overlong penalty would apply to every response: its buffer is as long as the longest one.",
    "E210": "The tiny model's heads do not divide its width.",
    "E211": "Critic and actor have different vocabularies.",
    "W212": "A step of full-length rows does not fit in storage.budget_gb.",
    "E213": "A role's ranks are no whole number of groups of context_parallel ranks, which compute rows together.",
    "E214": "context_parallel does not divide the model's attention heads, which the ranks of a group share.",
    # algorithm
    "E301": "GAE needs the values of a critic, and the mode has none.",
    "E302": "A critic would be trained and not used: the estimator is not GAE.",
    "E303": "A setting has no effect with the others. Delete it, or set what it needs.",
    "W303": "A later layer made a setting of an earlier one ineffective; it is left out.",
    "E304": "The correction compares engine and trainer, and the trainer's log-probabilities are not computed.",
    "E305": "The loss cannot be trained on directly: its gradient does not depend on the teacher.",
    "W306": "A KL estimator is set, and its weight is 0.",
    "E307": "An adaptive KL coefficient that starts at 0 stays 0.",
    "E308": "A dual clip of 1 or less would cut the loss of every token with a negative advantage.",
    "E309": "icepop's floor is not below its cap.",
    "E310": "A stage reads a column that no earlier stage writes.",
    "W311": "A top-k loss is a poor advantage: it sums over tokens that were not sampled.",
    "W312": "A warm-up does not end within the run.",
    "W313": "The learning rate of the warm start is that of a tiny model: a pretrained one forgets what it knows.",
    "W314": "Groups are sampled ahead of training, and the loss compares with later weights than those that sampled.",
    # engines, data, rewards, names
    "E401": "There is no back end of this name. `tqppo backends list` shows those that are installed.",
    "E402": "The engine does not have this feature.",
    "W403": "The engine does not promise the same bytes for the same seed.",
    "E404": "The number of replicas is not the number of servers.",
    "E405": "An endpoint is not an address such as http://host:8000.",
    "E406": "A replica needs more GPUs than a node has.",
    "E407": "The roles need more GPUs than the cluster has.",
    "W407": "GPUs of the cluster have nothing to do. `tqppo validate-config` shows which.",
    "E408": "There is no agent loop of this name.",
    "E409": "There is no task of this name, or data.train is empty.",
    "E410": "The task does not take this argument or value.",
    "E411": "A source is neither a task, a file that can be read, nor a name of the hub (hub:NAME).",
    "E413": "vLLM and SGLang cannot serve attention heads of this size.",
    "E414": "checkpoint.keep_every is no multiple of checkpoint.interval, so that such checkpoints are never saved.",
    "E415": "Dynamic sampling needs groups of at least two sessions.",
    "E416": "There is no reward function of this name.",
    "E417": "tqppo sets this argument of the engine itself.",
    "E418": "The agent loop has no such argument.",
    "E419": "The agent loop needs an argument that is missing.",
    "E420": "A session may become more trajectories than rollout.max_trajectories allows.",
    "E421": "The agent loop cannot use this value.",
    "E422": "A stage of the step, or an engine, does not fit on a GPU of cluster.gpu_memory_gb.",
    "E423": "One process (cluster.in_process) has one rank per role, the embedded engine, simple storage and no GPUs.",
    "E424": "Engines that sample ahead of training (rollout.ahead) need GPUs of their own.",
    "E425": "With cluster.shard_within_nodes every node holds as many ranks of a role.",
    "E431": "data.weights needs one weight for each of several sources in data.train.",
    "E432": "reward.weights needs one weight for each function in reward.function.",
    "E433": "With several reward functions, reward.function_args has a table for each, by its name.",
    "W434": "Nothing is validated: files have no held-out part of their own. Set validation.data.",
    "E435": "run.name cannot be a folder's name: use letters, digits and . _ + -. Another place for runs is run.dir.",
    # teachers
    "E501": "Mode distill needs a teacher: [teachers.NAME].",
    "E502": "The teacher pool has no GPUs, and the teachers or the run need them.",
    "E503": "The teachers use another number of GPUs than their pool has.",
    "E504": "A teacher's replica would span two nodes.",
    "E505": "The teacher's engine cannot score.",
    "E506": "The teacher's engine returns fewer top tokens than distillation.top_k.",
    "E507": "Rows may be longer than what the teacher takes.",
    "E508": "There are several teachers, and one does not say which samples it scores.",
    "E509": "A value is routed to two teachers.",
    "E510": "The data has values that no teacher scores.",
    "E511": "The teacher's vocabulary differs from the student's.",
    "E512": "Rows lack the column that chooses the teacher.",
    "W513": "No row is routed to a teacher.",
    "W514": "The data is too large to look through for rows without a teacher.",
    "W515": "Teacher and student end their answers with different tokens.",
    "E516": "A teacher's name is also the name of metrics and files: use letters, digits, - and _.",
    "E517": "The loss compares whole vocabularies, and the teacher's engine gives no hidden states.",
    "E518": "task:NAME makes tiny teachers, for a tiny student only.",
    "W519": "A teacher that is the student and reads the same prompt teaches nothing.",
    "W520": "The student samples at another temperature than it is compared at.",
    "E521": "Groups without a teacher's scores are dropped, and each of them would end the run.",
    "E522": "A teacher's prompt is not a template: {prompt}, {answer} and {column} are filled in.",
    "E523": "A teacher's prompt does not contain the question: {prompt} is missing.",
    "E524": "A teacher's prompt names a column that rows lack.",
    # this machine: --probe, and the start of train
    "E601": "Model or tokenizer cannot be loaded. Check the path; a hub name needs network or a cached copy.",
    "E602": "The data cannot be read: a file, a column or a prompt's length is wrong.",
    "E603": "The reward function cannot be imported or called, or fails on a row. Try it: `tqppo reward try`.",
    "W604": "A reference answer does not score: reward.function or data.answer_key is probably wrong.",
    "E605": "The tokenizers of teacher and student differ.",
    "E606": "An engine's environment or server is not there. `tqppo backends install` builds environments.",
    "E607": "This machine has fewer GPUs than cluster.gpus_per_node.",
    "E608": "A package of an extra is not installed.",
    "E609": "storage.dir is not a folder.",
    "W610": "Shared memory has less room than storage.budget_gb.",
    "E611": "The agent loop, its tools or the teachers cannot be used.",
    "E612": "The run's processes need more memory than this machine has. The message lists the largest of them.",
    "W613": "/dev/shm has too little room for new weights on their way to engines: they go through slower files.",
    "E614": "The run would write more than is free on the disk of run.dir.",
    "E615": "A stage of the step, or an engine, does not fit on this machine's GPUs.",
    "W621": "A batch has more prompts than the data has rows, so that every step trains on the same ones.",
    "E622": "The model has no module of a name in model.lora_targets.",
    "W623": "A file or folder that the config names is not there. Paths in a TOML file are relative to that file.",
}


def sections() -> dict[str, list[str]]:
    """The codes by their first digit, for a page."""
    titles = {
        "0": "Files and layers",
        "1": "Keys and values",
        "2": "Batches and lengths",
        "3": "The algorithm",
        "4": "Engines, data, rewards, names",
        "5": "Teachers",
        "6": "This machine",
    }
    return {title: [code for code in MEANINGS if code[1] == digit] for digit, title in titles.items()}


def page() -> str:
    """`docs/troubleshooting.md`: every code with its meaning."""
    head = (
        "# Every diagnostic\n\nCodes that begin with E are errors, those with W warnings. "
        "`tqppo explain E104` prints one entry; this page is made by `tqppo explain --all`.\n"
    )
    parts = []
    for title, codes in sections().items():
        rows = "".join(f"| {code} | {MEANINGS[code]} |\n" for code in codes)
        parts.append(f"\n## {title}\n\n| code | meaning |\n|---|---|\n{rows}")
    return head + "".join(parts)
