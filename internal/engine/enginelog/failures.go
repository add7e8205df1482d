package enginelog

// What to do, where several messages ask for the same.
const (
	lessMemory = "; lower --gpu-memory-utilization (SGLang: --mem-fraction-static), --max-model-len or " +
		"--max-num-seqs, or give each rank more GPUs"
	freeMemory = "; end the processes that hold the memory (nvidia-smi lists them), or lower " +
		"--gpu-memory-utilization"
	moreGPUs  = "give each rank more GPUs"
	giveToken = "; ask for access on its page and put a token of yours into engine.env: HF_TOKEN"
	noModel   = "; correct model.source, or put HF_TOKEN into engine.env if the repository is private"
	getModel  = "; download it to this node first, or write its folder into model.source"
	moreShm   = "/dev/shm is too small; run the container with --shm-size 16g or --ipc host, on Kubernetes " +
		"mount an emptyDir with medium Memory there"
	newDriver = "; update the driver, or install an engine that was built for the older CUDA"
	newEngine = "; install a newer version of the engine"
	ownCode   = "the model comes with code of its own; if you trust it, write trust_remote_code: true into " +
		"engine.args"
	otherPort = "; end that process, or give this node a --port-range of its own"
)

// failures are the messages of failed starts; the first that any line matches counts.
//
//nolint:gochecknoglobals // a constant table
var failures = []message{
	// Memory of the device.
	{
		"Free memory on device", expr(
			`Free memory on device (?:\S+ )?\(([\d.]+)/([\d.]+) GiB\) on startup is less than desired GPU ` +
				`memory utilization \(([\d.]+), ([\d.]+) GiB\)`),
		"$1 of $2 GiB GPU memory are free, --gpu-memory-utilization $3 wants $4 GiB" + freeMemory,
	},
	{
		"available KV cache memory", expr(
			`max seq len \((\d+)\), \(([\d.]+ G\w+) KV cache is needed, which is larger than the available ` +
				`KV cache memory \(([\d.]+ G\w+)\)\. Based on the available memory, the estimated maximum ` +
				`model length is (\d+)`),
		"requests of $1 tokens need $2 of KV cache, $3 are there; write max_model_len: $4 or less into " +
			"engine.args, or raise --gpu-memory-utilization",
	},
	{
		"available KV cache memory", expr(
			`max seq len \((\d+)\), \(([\d.]+ G\w+) KV cache is needed, which is larger than the available ` +
				`KV cache memory \(([\d.]+ G\w+)\)`),
		"requests of $1 tokens need $2 of KV cache, $3 are there; lower max_model_len in engine.args, or " +
			"raise --gpu-memory-utilization",
	},
	{
		"No available memory for the cache blocks", nil,
		"the weights leave no GPU memory for the KV cache; raise --gpu-memory-utilization, or " + moreGPUs,
	},
	{
		"Please try to increase --mem-fraction-static", nil,
		"the weights leave no GPU memory for the KV cache; raise --mem-fraction-static, or " + moreGPUs,
	},
	{
		"out of memory occurred when warming up", expr(`warming up \w+ with (\d+) dummy`),
		"the GPU ran out of memory with $1 requests at once; lower --max-num-seqs or " +
			"--gpu-memory-utilization",
	},
	{
		"out of memory. Tried to allocate", expr(
			`Tried to allocate ([\d.]+ \w+)\. GPU (\d+) has a total capacity of ([\d.]+ \w+) of which ` +
				`([\d.]+ \w+) is free`),
		"GPU $2 is out of memory: $1 wanted, $4 of $3 free" + lessMemory,
	},
	{"CUDA out of memory", nil, "the GPU is out of memory" + lessMemory},
	{"HIP out of memory", nil, "the GPU is out of memory" + lessMemory},
	{"CUDA error: out of memory", nil, "the GPU is out of memory" + freeMemory},
	{"Cuda failure 'out of memory'", nil, "the GPU is out of memory" + lessMemory},
	{
		"The memory capacity is unbalanced", nil,
		"the rank's GPUs have unequal free memory; end what else runs on them (nvidia-smi lists it)",
	},

	// The device and its driver.
	{
		"NVIDIA driver on your system is too old", expr(`too old \(found version (\d+)\)`),
		"the NVIDIA driver is too old for the engine (it has CUDA version number $1)" + newDriver,
	},
	{
		"CUDA driver version is insufficient", nil,
		"the NVIDIA driver is too old for the engine" + newDriver,
	},
	{
		"Found no NVIDIA driver", nil,
		"the engine finds no NVIDIA driver; install it, or give the container its GPUs (--gpus all)",
	},
	{
		"no kernel image is available", nil,
		"the engine was not built for this model of GPU; install a build that was",
	},
	{
		"No CUDA GPUs are available", nil,
		"the engine sees no GPU; compare `dpserve nodes` with nvidia-smi, or give the container its GPUs",
	},
	{
		"invalid device ordinal", nil,
		"the engine was given a GPU that it does not see; compare --gpus of this node with nvidia-smi",
	},
	{
		"devices are busy or unavailable", nil,
		"another process holds the GPU for itself (nvidia-smi lists it); end it, or set its compute mode " +
			"to default",
	},
	{
		"uncorrectable ECC error", nil,
		"the GPU has a memory fault; reset it (nvidia-smi -r) or take it out of --gpus",
	},
	{
		"Failed to infer device type", nil,
		"vLLM finds no device that this build of it supports; compare nvidia-smi or rocm-smi",
	},
	{
		"larger than the number of available GPUs", expr(
			`World size \((\d+)\) is larger than the number of available GPUs \((\d+)\)`),
		"tensor and pipeline parallelism need $1 GPUs and the engine sees $2; raise resources.gpus, or " +
			"lower tensor_parallel_size",
	},

	// How the model is split and computed.
	{
		"must be divisible by tensor parallel size", expr(
			`attention heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)`),
		"$1 attention heads cannot be split over $2 GPUs; choose a tensor_parallel_size that divides $1",
	},
	{
		"heads % tp_size == 0", nil,
		"the attention heads cannot be split over that many GPUs; choose a tensor_parallel_size that " +
			"divides their number",
	},
	{
		"is greater than the derived max_model_len", expr(
			`User-specified max_model_len \((\d+)\) is greater than the derived max_model_len ` +
				`\(\w+=([\d.]+) .*To allow overriding`),
		"max_model_len $1 is more than the $2 tokens of the model; lower it in engine.args",
	},
	{
		"is greater than the derived context_length", expr(
			`context_length \((\d+)\) is greater than the derived context_length \((\d+)\)\.` +
				`.*To allow overriding`),
		"context_length $1 is more than the $2 tokens of the model; lower it in engine.args",
	},
	{
		"Bfloat16 is only supported on GPUs", expr(`Your (.{1,60}) GPU `),
		"$1 cannot compute bfloat16; write dtype: half into engine.args",
	},
	{
		"is not supported for quantization method", expr(
			`(\S+) is not supported for quantization method (\S+)\. Supported dtypes: (\[[^\]]*\])`),
		"quantization $2 does not compute $1; write one of $3 as dtype into engine.args",
	},
	{
		"is not supported for the current GPU", expr(
			`quantization method (\S+) is not supported for the current GPU\. Minimum capability: (\d+)\. ` +
				`Current capability: (\d+)`),
		"quantization $1 needs a GPU of compute capability $2 and this one has $3; take another version " +
			"of the model or another GPU",
	},
	{
		"does not match the quantization method", expr(
			`\((\S+)\) does not match the quantization method specified in the .quantization. argument`),
		"the model is quantized as $1; leave quantization out of engine.args",
	},
	{
		"Non-MoE models do not support external data parallel mode", nil,
		"a dense model cannot be a lockstep group; write coupling: independent into data_parallel",
	},
	{
		"Configuration mismatch detected for engine", expr(`detected for engine (\d+)`),
		"rank $1 has other settings than rank 0; give all ranks the same engine and flags",
	},

	// The model.
	{
		"Cannot access gated repo", expr(
			`Cannot access gated repo for url https?://[^/]+/(?:api/models/)?([^/\s]+/[^/\s]+)`),
		"the model $1 is gated" + giveToken,
	},
	{"access a gated repo", nil, "the model is gated" + giveToken},
	{"is a gated repository", nil, "the model is gated" + giveToken},
	{
		"is not a valid model identifier", expr(`(\S+) is not a local folder and is not a`),
		"there is no model $1, neither as a folder nor as a repository" + noModel,
	},
	{
		"Repository Not Found for url", expr(
			`Repository Not Found for url: https?://[^/]+/(?:api/models/)?([^/\s]+/[^/\s]+)`),
		"there is no repository $1" + noModel,
	},
	{
		"HFValidationError: Repo id must", expr(`Repo id must .*: '([^']*)'`),
		"the folder $1 is not on this node, and the name is no repository; correct model.source",
	},
	{
		"Invalid repository ID or local directory specified", expr(`specified: ?'([^']*)'`),
		"the engine finds no model $1, neither as a folder with a config.json nor as a repository" + noModel,
	},
	{
		"is not a valid git identifier", expr(`(\S+) is not a valid git identifier`),
		"the model has no revision $1; correct revision in engine.args",
	},
	{
		"couldn't connect to 'https://huggingface.co'", nil,
		"the model is not in this node's cache, and huggingface.co does not answer" + getModel,
	},
	{
		"outgoing traffic has been disabled", nil,
		"the model is not in this node's cache, and HF_HUB_OFFLINE forbids the download" + getModel,
	},
	{
		"Cannot find any model weights with", expr("weights with `([^`]*)`"),
		"the model $1 has no weights; download it again, or correct model.source",
	},
	{
		"does not appear to have a file named", expr(
			`(\S+) does not appear to have a file named (\S+?)\.? `),
		"the model $1 has no file $2; download it again, or correct model.source",
	},
	{
		"Error while deserializing header", nil,
		"a file of weights is damaged or incomplete (perhaps a pointer of Git LFS); download it again",
	},
	{
		"Following weights were not initialized", expr(`from checkpoint: (.{1,120})`),
		"the checkpoint lacks weights of the model: $1; download it again, or install the version of the " +
			"engine that it needs",
	},
	{"consider setting `trust_remote_code=True`", nil, ownCode},
	{"contains custom code which must be executed", nil, ownCode},
	{"requires you to execute the configuration file", nil, ownCode},
	{
		"are not supported for now", expr(`Model architectures (.{1,120}) are not supp`),
		"the engine does not know the architecture $1" + newEngine,
	},
	{
		"does not recognize this architecture", expr("has model type `([^`]*)`"),
		"the engine's transformers package does not know models of type $1" + newEngine,
	},

	// The command line.
	{
		unknownFlag, expr(`unrecognized arguments: (\S.*?)\s*$`),
		"the engine does not know $1; correct engine.args",
	},
	{
		"invalid choice:", expr(
			`error: argument (\S+?):? invalid choice: (.*?) ?\(choose from (.*?)\)?$`),
		"$1 does not take $2; write one of $3 into engine.args",
	},
	{
		"error: argument", expr(`error: argument (\S+?): (.+)$`),
		"the engine refuses $1: $2; correct engine.args",
	},
	{
		"error: ambiguous option", expr(`ambiguous option: (.+)$`),
		"a flag is short for several: $1; write it out in engine.args",
	},

	// What the machine lacks.
	{
		"ddress already in use", expr(`on address \('[^']*', (\d+)\)|port: (\d+), useIpv6`),
		"port $1$2 is taken by another process" + otherPort,
	},
	{"EADDRINUSE", nil, "a port is taken by another process" + otherPort},
	{
		"ddress already in use", expr(`ddress already in use(?:[^.]|\.?$)`), // no retry follows
		"a port is taken by another process" + otherPort,
	},
	{
		"is not available in", expr(`at (\d+) is not available in \d+ seconds`),
		"port $1 is taken by another process" + otherPort,
	},
	{"Error while creating shared memory segment", nil, moreShm},
	{"/dev/shm", expr(`/dev/shm.*No space left on device`), moreShm},
	{"insufficient shared memory", nil, moreShm},
	{"unable to allocate shared memory", nil, moreShm},
	{"unable to write to file </torch_", nil, moreShm},
	{"No space left on device: '/psm_", nil, moreShm},
	{
		"No space left on device", nil,
		"a disk is full; free space where the model is cached (HF_HOME) and in the temporary folder",
	},
	{
		"OSError: [Errno 24]", expr("(?:^|[^`])OSError: \\[Errno 24\\]"),
		"the engine may open too few files; raise the limit of dpserve (ulimit -n, LimitNOFILE)",
	},
	{
		"(exit code: -9)", nil,
		"the kernel has killed a worker of the engine: the machine is out of memory (dmesg | grep -i oom)",
	},
	{
		"Cannot allocate memory", nil,
		"the machine is out of memory; lower --swap-space and --cpu-offload-gb, or the ranks of this node",
	},

	// The engine's installation and settings.
	{
		"ModuleNotFoundError: No module named", expr(
			`(?:^|\] |\) )ModuleNotFoundError: No module named '([^']{1,80})'`),
		"the engine's Python lacks the module $1; install it there, or correct engine.command",
	},
	{
		"undefined symbol", expr(`ImportError: \S*?([\w.-]{1,60}): undefined symbol`),
		"the engine's packages do not fit together ($1); install them anew, all at once",
	},
	{
		"Value error, ", expr(`^.{0,60}?\s\sValue error, (.+?)(?: \[type=.*)?$`),
		"the engine refuses its settings: $1",
	},
}

// followUps are messages that often follow from a failure elsewhere.
//
//nolint:gochecknoglobals // a constant table
var followUps = []message{
	{
		"NCCL error", expr(
			`(unhandled \w+ error|internal error|invalid usage|invalid argument|remote process exited)`),
		"NCCL failed: $1; look at the other ranks first, then put NCCL_DEBUG: INFO into engine.env; " +
			"common causes are a small /dev/shm, a firewall, and a wrong NCCL_SOCKET_IFNAME",
	},
	{
		"connectFullMesh failed", nil,
		"the ranks cannot reach each other; put the name of their network interface into engine.env: " +
			"GLOO_SOCKET_IFNAME",
	},
	{
		"client socket has timed out", nil,
		"the rank did not reach rank 0; look at the log of rank 0, and at firewalls between the nodes",
	},
	{
		"collective operation timeout", nil,
		"a collective operation took too long: another rank hangs or has ended; look at its log",
	},
	{
		"died unexpectedly", expr(`(Worker\S*(?: proc \S+)?) died unexpectedly`),
		"$1 died without a message; the machine may be out of memory (dmesg | grep -i oom)",
	},
}
