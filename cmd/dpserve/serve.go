package main

import (
	"context"
	"errors"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engineflags"
	"github.com/dpserve/dpserve/internal/problem"
)

// serveFlags are the flags of serve: those of up, and what the application is made of.
type serveFlags struct {
	up    *upFlags
	set   *pflag.FlagSet
	print bool

	model    string
	names    []string // --served-model-name: the model's id, then its aliases
	adapters []string // --lora-modules
	engine   string
	command  string
	env      []string
	startup  time.Duration
	grace    float64 // --shutdown-timeout

	dpSize, prefill int
	gpus            float64
	lockstep        bool
	name, transfer  string
}

func newServe(e *env) *cobra.Command {
	cmd, _ := serveCommand(e)
	return cmd
}

// serveCommand returns the command and what its flags say once they are parsed.
func serveCommand(e *env) (*cobra.Command, *serveFlags) {
	f := &serveFlags{up: newUpFlags()}
	cmd := &cobra.Command{
		Use:   "serve MODEL [flags] [-- ENGINE FLAGS]",
		Short: "start a model's engines and serve them, all in the foreground, without a file",
		Long: `serve starts one engine per rank for MODEL, a Hugging Face id or a local folder, and one
endpoint in front of them. It prints the app.yaml that it runs, and runs it as up does. --print only prints
it; deploy takes it to a cluster.

Flags of vllm serve and of sglang.launch_server stand before or behind --. They go to engine.args as they are,
except for those that dpserve reads itself:
  --data-parallel-size, -dp, --dp      as --dp-size
  --enable-expert-parallel             goes to the engine; with --dp-size above 1 as --lockstep too
  --enable-dp-attention                goes to the engine; as --lockstep too
  --attn-dp-size N                     as --dp-size N --enable-dp-attention
  --served-model-name NAME...          model.id, then model.aliases
  --lora-modules, --lora-paths         model.adapters
  --host, --port                       where dpserve listens; engines stay on 127.0.0.1
  --kv-transfer-config                 with --prefill, its connector is --transfer
  --shutdown-timeout                   graceful_shutdown_timeout_s
Flags for parts of an engine that dpserve replaces (--kv-events-config, --load-balance-method,
--data-parallel-address, ...) are left out with a message. Flags that an engine of dpserve cannot have
(--headless, --node-rank, --disaggregation-mode, ...) are refused with what to write instead. A flag of a new
version, which dpserve does not know, goes after --. If dpserve and the engine share a
flag, before -- it is dpserve's.

Flags of SGLang's router (--router-policy, --cache-threshold, ...), of Dynamo (--router-mode,
--kv-overlap-score-weight, ...) and of Furiosa-LLM (--data-parallel-routing-policy, ...) mean what they mean
there. One that says nothing here is left out with a message, one that dpserve lacks is refused with what to
write instead.`,
		Example: `  dpserve serve Qwen/Qwen3-8B --dp-size 4
  dpserve serve Qwen/Qwen3-8B --dp-size 4 --engine sim           # without GPUs
  dpserve serve Qwen/Qwen3-30B-A3B --dp-size 8 --lockstep --enable-expert-parallel
  dpserve serve /models/llama --prefill 2 --dp-size 4 --gpus-per-rank 2 -- --max-model-len 32768
  dpserve serve --engine sglang --model-path Qwen/Qwen3-8B --tp-size 2 --dp-size 4`,
		Args: func(cmd *cobra.Command, args []string) error { return f.checkArgs(cmd, args) },
	}
	f.set, f.up.set = cmd.Flags(), cmd.Flags()
	f.add(cmd)
	cmd.SetFlagErrorFunc(f.flagError)
	cmd.ValidArgsFunction = f.complete
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if f.print && f.set.Changed("output") {
			return usageError("serve", "--print and --output exclude each other")
		}
		return f.run(cmd.Context(), e, args)
	}
	return cmd, f
}

// add adds the flags of serve.
func (f *serveFlags) add(cmd *cobra.Command) {
	engines := []string{engineflags.VLLM, engineflags.SGLang, engineflags.Sim}
	f.set.StringVar(&f.engine, "engine", engineflags.VLLM, "vllm, sglang or sim, the simulated engine")
	f.set.IntVar(&f.dpSize, "dp-size", 1, "data-parallel `ranks`: engines, or decode engines with --prefill")
	f.set.BoolVar(&f.lockstep, "lockstep", false,
		"the ranks are one group and fail together, as mixture-of-experts models over several ranks do")
	f.set.IntVar(&f.prefill, "prefill", 0, "`ranks` that only compute prompts, on top of those of --dp-size")
	f.set.StringVar(&f.transfer, "transfer", "",
		"how KV blocks go from a prefill rank to a decode rank: nixl, nixl-push, mooncake, sglang or sim")
	f.set.Float64Var(&f.gpus, "gpus-per-rank", 0,
		"`devices` of a rank, or the share of one, such as 0.25; default: what its parallel sizes use; "+
			"0 for an engine without devices")
	f.set.StringVar(&f.name, "name", "", "name of the application; default: made of MODEL")
	f.set.StringArrayVar(&f.names, "served-model-name", nil,
		"`name` that clients send as \"model\"; repeatable; default: MODEL")
	f.set.StringVar(&f.command, "command", "",
		"`program` of the engine, with its first arguments; default: \"vllm serve\" or "+
			"\"python3 -m sglang.launch_server\"")
	f.set.StringArrayVar(&f.env, "env", nil, "`KEY=VALUE` for the engines' environment; repeatable")
	f.set.DurationVar(&f.startup, "startup-timeout", 0, "longest start of an engine; default: 10m0s")
	f.set.BoolVar(&f.print, "print", false, "print the app.yaml and end")
	f.set.StringVar(&f.model, "model", "", "another way to write MODEL")
	f.set.StringArrayVar(&f.adapters, "lora-modules", nil, "LoRA adapter, `NAME=SOURCE`; repeatable")
	f.set.Float64Var(&f.grace, "shutdown-timeout", upGraceS,
		"`seconds` that running streams get at the end; 0 cuts them")
	f.up.addCommon(cmd)
	f.up.settings.addRouterFlags(f.set, "serve")
	_ = cmd.RegisterFlagCompletionFunc("engine",
		cobra.FixedCompletions(engines, cobra.ShellCompDirectiveNoFileComp))
}

// checkArgs allows one argument before the dash, and flags behind it.
func (f *serveFlags) checkArgs(cmd *cobra.Command, args []string) error {
	before := beforeDash(cmd, args)
	switch {
	case len(before) == 0 && f.model == "":
		return problem.New(problem.InvalidArgument, "serve wants MODEL").
			WithHint("for example `dpserve serve Qwen/Qwen3-8B --dp-size 4`")
	case len(before) > 0 && f.model != "" && before[0] != f.model:
		return usageError("serve", "two models: %q and --model %q", before[0], f.model)
	case len(before) > 1:
		return usageError("serve", "serve takes MODEL and nothing more, got %q", before[1])
	}
	return nil
}

// beforeDash returns the arguments before --.
func beforeDash(cmd *cobra.Command, args []string) []string {
	if n := cmd.ArgsLenAtDash(); n >= 0 {
		return args[:n]
	}
	return args
}

// run prints the application, or serves it.
func (f *serveFlags) run(ctx context.Context, e *env, args []string) error {
	file, err := f.file(e, f.takeModel(args))
	if err != nil {
		return err
	}
	if f.print {
		_, err = e.io.Out.Write(file.text)
		return err
	}
	if err := f.up.setBind(ctx, e); err != nil {
		return err
	}
	if err := f.checkDevices(file.apps); err != nil {
		return err
	}
	if err := checkPrograms(ctx, file.apps); err != nil {
		return err
	}
	if err := f.up.showFile(e, file.text); err != nil {
		return err
	}
	return runUp(ctx, e, f.up, file)
}

// takeModel takes MODEL off the arguments, and returns the words behind --.
func (f *serveFlags) takeModel(args []string) (behind []string) {
	if f.model == "" {
		f.model = args[0]
		return args[1:]
	}
	if len(args) > 0 && args[0] == f.model {
		return args[1:]
	}
	return args
}

// checkDevices refuses engines that need devices where this node offers none. Too few of them are the
// deploy's business.
func (f *serveFlags) checkDevices(apps []*app.Application) error {
	if offersDevices(f.up.node.config.GPUs) {
		return nil
	}
	for _, a := range apps {
		if a.Resources.GPUs == 0 || a.Engine.Kind == app.KindAttach {
			continue
		}
		return problem.New(problem.Unplaceable, "no device is known here, and %s needs %s per rank",
			a.Engine.Kind, formatCount(a.Resources.Devices(), "device")).
			WithHint("--gpus N names the devices of this machine\n" +
				"--engine sim runs the same command line on the simulated engine\n" +
				"--gpus-per-rank 0 starts an engine that needs none, such as vLLM's build for CPUs")
	}
	return nil
}

// offersDevices reports whether a node with these --gpus may have devices. The programs that find them say
// how many, once the node runs.
func offersDevices(gpus string) bool {
	switch gpus {
	case "", "none", "0":
		return false
	case "auto":
		return slices.ContainsFunc([]string{"nvidia-smi", "rocm-smi"}, func(program string) bool {
			_, err := exec.LookPath(program)
			return err == nil
		})
	default:
		return true
	}
}

// flagError says what an unknown flag would be called, or where it belongs.
func (f *serveFlags) flagError(cmd *cobra.Command, err error) error {
	missing, ok := errors.AsType[*pflag.NotExistError](err)
	if !ok {
		return flagError(cmd, err)
	}
	name := missing.GetSpecifiedName()
	unknown := problem.New(problem.InvalidArgument, "%s", err.Error())
	if hint := suggestServe(f.set, f.engine, name); hint != "" {
		return unknown.WithHint("%s", hint)
	}
	return unknown.WithHint("a flag of the engine that dpserve does not know stands behind --: "+
		"`dpserve serve %s ... -- --%s`", "MODEL", name)
}

// complete offers folders for MODEL, and behind -- the flags of the engine.
func (f *serveFlags) complete(_ *cobra.Command, args []string, prefix string,
) ([]cobra.Completion, cobra.ShellCompDirective) {
	if strings.HasPrefix(prefix, "-") {
		var out []cobra.Completion
		for _, name := range engineflags.Names(f.engine) {
			if strings.HasPrefix("--"+name, prefix) && len(out) < maxCompletions {
				out = append(out, "--"+name)
			}
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	}
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveDefault // a file of an engine's flag
	}
	return nil, cobra.ShellCompDirectiveFilterDirs
}
