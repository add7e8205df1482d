package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engineflags"
	"github.com/dpserve/dpserve/internal/nearest"
	"github.com/dpserve/dpserve/internal/problem"
)

// object is a map of an application file. JSON is YAML.
type object map[string]any

// file returns the application that the command line describes, in canonical text. behind are the words
// behind --.
func (f *serveFlags) file(e *env, behind []string) (*appFile, error) {
	if err := nearest.CheckFlag("--engine", f.engine, engineflags.VLLM, engineflags.SGLang,
		engineflags.Sim); err != nil {
		return nil, err
	}
	args := &serveArgs{f: f}
	if err := args.read(e, behind); err != nil {
		return nil, err
	}
	doc, err := f.describe(args)
	if err != nil {
		return nil, err
	}
	f.up.settings.apply(e, doc)
	text, err := json.Marshal(object{"applications": []any{doc}})
	if err != nil {
		return nil, problem.New(problem.Internal, "cannot write the application: %w", err).
			WithHint("this is a fault of dpserve: please report the command line")
	}
	parsed, warnings, err := app.Parse(app.Default(), "serve", text)
	for _, w := range warnings {
		printMessage(e.io.Err, "warning: %s: %s; hint: %s", f.wordOf(w.Path), app.Fault(w).Describe(), w.Hint)
	}
	var faults app.Faults
	if errors.As(err, &faults) {
		return nil, f.up.settings.explain("serve", faults, f.wordOf)
	}
	if err != nil {
		return nil, err
	}
	return &appFile{name: "serve", text: parsed.Print(), apps: parsed.Applications}, nil
}

// describe returns the application as it stands in a file.
func (f *serveFlags) describe(args *serveArgs) (object, error) {
	source, err := f.source()
	if err != nil {
		return nil, err
	}
	model := object{"id": f.id()}
	if source != f.id() {
		model["source"] = source
	}
	if len(f.names) > 1 {
		model["aliases"] = f.names[1:]
	}
	if model["adapters"], err = f.readAdapters(); err != nil {
		return nil, err
	}
	engine, err := f.describeEngine(args)
	if err != nil {
		return nil, err
	}
	doc := object{
		"name": f.name, "model": model, "engine": engine, "graceful_shutdown_timeout_s": f.grace,
	}
	if !f.set.Changed("name") {
		doc["name"] = nameOf(f.id(), "model")
	}
	if f.set.Changed("gpus-per-rank") {
		doc["resources"] = object{"gpus": f.gpus}
	}
	if f.prefill == 0 {
		doc["data_parallel"] = f.group(f.dpSize, args)
	} else {
		doc["prefill"] = object{"data_parallel": f.group(f.prefill, args)}
		doc["decode"] = object{"data_parallel": f.group(f.dpSize, args)}
	}
	if f.transfer != "" {
		doc["disaggregation"] = object{"transfer": f.transfer}
	}
	return prune(doc), nil
}

// prune removes the empty values of an application.
func prune(o object) object {
	for key, value := range o {
		switch v := value.(type) {
		case object:
			prune(v)
		case []any:
			if len(v) == 0 {
				delete(o, key)
			}
		}
	}
	return o
}

// id is the name that clients send.
func (f *serveFlags) id() string {
	if len(f.names) > 0 {
		return f.names[0]
	}
	return f.model
}

// source is what the engine loads. A folder becomes absolute, so that the file means the same everywhere on
// this machine.
func (f *serveFlags) source() (string, error) {
	if f.engine == engineflags.Sim {
		return f.model, nil // it loads nothing
	}
	path, isHome := strings.CutPrefix(f.model, "~/")
	if home, err := os.UserHomeDir(); isHome && err == nil {
		path = filepath.Join(home, path)
	}
	isPath := isHome || filepath.IsAbs(path) || slices.Contains([]string{".", ".."}, path) ||
		strings.HasPrefix(path, "./") || strings.HasPrefix(path, "../")
	_, err := os.Stat(path)
	switch {
	case err == nil:
		return filepath.Abs(path)
	case isPath:
		return "", problem.New(problem.InvalidArgument, "cannot read the model %s: %w", f.model,
			errors.Unwrap(err)).
			WithHint("MODEL is a folder with the model's files, or a Hugging Face id such as Qwen/Qwen3-8B")
	}
	return f.model, nil
}

// readAdapters reads --lora-modules: NAME=SOURCE, or JSON with name and path, or as SGLang names them.
func (f *serveFlags) readAdapters() ([]any, error) {
	var out []any
	for _, text := range f.adapters {
		id, source, ok := strings.Cut(text, "=")
		if strings.HasPrefix(text, "{") {
			var module struct {
				Name, Path string
				LoRAName   string `json:"lora_name"`
				LoRAPath   string `json:"lora_path"`
			}
			ok = json.Unmarshal([]byte(text), &module) == nil
			id, source = cmp.Or(module.Name, module.LoRAName), cmp.Or(module.Path, module.LoRAPath)
			ok = ok && source != ""
		}
		if !ok {
			return nil, usageError("serve", "--lora-modules %q: wanted NAME=SOURCE", text)
		}
		out = append(out, object{"id": id, "source": source})
	}
	return out, nil
}

// describeEngine returns the key engine of the application.
func (f *serveFlags) describeEngine(args *serveArgs) (object, error) {
	out := object{"kind": f.engine}
	if len(args.list) > 0 {
		out["args"] = args
	}
	if command := strings.Fields(f.command); len(command) > 0 {
		if f.engine == engineflags.VLLM && len(command) == 1 && filepath.Base(command[0]) == "vllm" {
			command = append(command, "serve")
		}
		out["command"] = command
	}
	env := object{}
	for _, text := range f.env {
		name, value, ok := strings.Cut(text, "=")
		if !ok {
			return nil, usageError("serve", "--env %q: wanted KEY=VALUE", text)
		}
		env[name] = value
	}
	if len(env) > 0 {
		out["env"] = env
	}
	if f.set.Changed("startup-timeout") {
		out["startup_timeout_s"] = f.startup.Seconds()
	}
	return out, nil
}

// group returns data_parallel of the application or of a pool. SGLang's coupling follows from its flags.
func (f *serveFlags) group(size int, args *serveArgs) object {
	out := object{"dp_size": size}
	switch {
	case f.engine == engineflags.SGLang && !f.set.Changed("lockstep"):
	case f.isLockstep(size, args):
		out["coupling"] = app.Lockstep
	default:
		out["coupling"] = app.Independent
	}
	return out
}

// isLockstep reports whether the ranks are one group. Experts or attention spread over the ranks say so.
func (f *serveFlags) isLockstep(size int, args *serveArgs) bool {
	if f.set.Changed("lockstep") {
		return f.lockstep
	}
	return size > 1 && (args.isOn("enable_expert_parallel") || args.isOn("enable_dp_attention"))
}

// explainFaults says the faults of an application in the words of the command line; wordOf returns the word
// that a key comes from.
func explainFaults(command string, faults app.Faults, wordOf func(path string) string) error {
	var lines []string
	inWords := strings.NewReplacer("resources.gpus", "--gpus-per-rank", "engine.args.tp_size", "--tp-size",
		"model.source", "MODEL", "engine.args", "the engine's flags")
	for i := range faults {
		faults[i].Hint = inWords.Replace(faults[i].Hint)
		lines = append(lines, wordOf(faults[i].Path)+": "+faults[i].Describe())
	}
	if len(faults) == 1 {
		err := problem.New(problem.InvalidArgument, "%s", lines[0])
		if faults[0].Hint == "" {
			return err.WithHint("see `dpserve help %s`", command)
		}
		return err.WithHint("%s", faults[0].Hint)
	}
	for i := range lines {
		if faults[i].Hint != "" {
			lines[i] += "; hint: " + faults[i].Hint
		}
	}
	return problem.New(problem.InvalidArgument, "%s", formatCount(len(lines), "fault")).
		WithDetails(slices.Compact(lines)...).WithHint("see `dpserve help %s`", command)
}

// wordOf returns the word of the command line that a key of the application comes from.
func (f *serveFlags) wordOf(path string) string {
	path = f.up.settings.wordOf(path)
	size := "--dp-size"
	if pool, isPrefill := strings.CutPrefix(path, "prefill."); isPrefill {
		path, size = pool, "--prefill"
	}
	path = strings.TrimPrefix(path, "decode.")
	id := "MODEL"
	if len(f.names) > 0 {
		id = "--served-model-name"
	}
	if name, isArg := strings.CutPrefix(path, "engine.args."); isArg {
		head, key, isKey := strings.Cut(strings.Trim(name, `"[]`), ".")
		if head = "--" + strings.ReplaceAll(head, "_", "-"); isKey {
			return head + "." + key
		}
		return head
	}
	for _, word := range [][2]string{
		{"model.id", id},
		{"model.aliases", "--served-model-name"},
		{"model.adapters", "--lora-modules"},
		{"model.source", "MODEL"},
		{"engine.env", "--env"},
		{"engine.command", "--command"},
		{"engine.startup_timeout_s", "--startup-timeout"},
		{"engine.args", "the engine's flags"},
		{"data_parallel.coupling", "--lockstep"},
		{"data_parallel.dp_size", size},
		{"num_", size},
		{"resources.gpus", "--gpus-per-rank"},
		{"disaggregation", "--transfer"},
		{"graceful_shutdown_timeout_s", "--shutdown-timeout"},
		{"name", "--name"},
		{"prefill", "--prefill"},
	} {
		if strings.HasPrefix(path, word[0]) {
			return word[1]
		}
	}
	return path
}
