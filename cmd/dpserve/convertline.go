package main

import (
	"bytes"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/attach"
	"github.com/dpserve/dpserve/internal/engineflags"
)

// knownPrograms are the programs whose command lines convert reads.
//
//nolint:gochecknoglobals // a constant list
var knownPrograms = []string{"sglang-router", "vllm", "dynamo", "furiosa"}

// unknownModel stands for the name of a model that the command line does not tell.
const unknownModel = "MODEL"

// convertLine prints the application that a command line of another program stands for. What serve and up say
// of it becomes comments.
func convertLine(e *env, from string, words []string) error {
	var said bytes.Buffer
	aside, streams := *e, *e.io
	streams.Err = &said
	aside.io = &streams
	words, engine := cutProgram(from, words)
	var file *appFile
	var err error
	if slices.ContainsFunc(words, namesEngines) {
		file, err = convertAttach(&aside, engine, words)
	} else {
		file, err = convertServe(&aside, engine, words)
	}
	if err != nil {
		return err
	}
	if from == "furiosa" {
		printMessage(&said, "dpserve starts vLLM for this line; servers of Furiosa-LLM can be attached")
	}
	var b bytes.Buffer
	for line := range strings.Lines(said.String()) {
		b.WriteString("# " + strings.TrimPrefix(line, "dpserve: "))
	}
	b.Write(file.print())
	_, err = e.io.Out.Write(b.Bytes())
	return err
}

// cutProgram takes the program's name off a command line, and returns the engine that it means.
func cutProgram(from string, words []string) (rest []string, engine string) {
	engine = engineflags.VLLM
	if from == "sglang-router" {
		engine = engineflags.SGLang
	}
	name := func() string {
		if len(words) == 0 {
			return ""
		}
		return filepath.Base(words[0])
	}
	if strings.HasPrefix(name(), "python") {
		words = words[1:]
	}
	switch {
	case name() == "-m" && len(words) > 1:
		if strings.Contains(words[1], "sglang") {
			engine = engineflags.SGLang // dynamo.sglang
		}
		words = words[2:]
	case slices.Contains([]string{"vllm", "furiosa-llm", "sglang", "vllm-router", "sglang-router"}, name()):
		words = words[1:]
	}
	if name() == "serve" {
		words = words[1:]
	}
	return words, engine
}

// namesEngines reports whether a word is a flag that names engines which run already.
func namesEngines(word string) bool {
	name, _, _ := strings.Cut(plainFlag(word), "=")
	return slices.Contains([]string{"--worker-urls", "--attach", "--prefill", "--decode"}, name)
}

// convertServe reads a command line that starts engines.
func convertServe(e *env, engine string, words []string) (*appFile, error) {
	cmd, f := serveCommand(e)
	if !slices.Contains(words, "--engine") {
		words = append([]string{"--engine", engine}, words...)
	}
	if err := cmd.ParseFlags(arrangeServe(cmd, words)); err != nil {
		return nil, f.flagError(cmd, err)
	}
	args := f.set.Args()
	if len(beforeDash(cmd, args)) == 0 && f.model == "" {
		f.model = unknownModel
		printMessage(e.io.Err, "the command line names no model: write its name for %s, and what runs it "+
			"under engine", unknownModel)
	}
	if err := f.checkArgs(cmd, args); err != nil {
		return nil, err
	}
	if !f.set.Changed("shutdown-timeout") {
		f.grace = app.Default().GracefulShutdownTimeout
	}
	tellNodeFlags(e, f.set)
	return f.file(e, f.takeModel(args))
}

// convertAttach reads a command line that names engines. Nothing is asked of them.
func convertAttach(e *env, engine string, words []string) (*appFile, error) {
	cmd, f := upCommand(e)
	if err := cmd.ParseFlags(arrangeUp(words)); err != nil {
		return nil, f.flagError(cmd, err)
	}
	if err := f.checkArgs(cmd, f.set.Args()); err != nil {
		return nil, err
	}
	f.engines.attach = append(f.engines.attach, f.set.Args()...)
	text, _, err := attachFile(&f.engines, func(urls []string, _ app.Engine) (found []attach.Found, _ error) {
		for _, u := range urls {
			found = append(found, attach.Found{URL: u, Family: engine, Models: []string{unknownModel}})
		}
		return found, nil
	})
	if err != nil {
		return nil, err
	}
	printMessage(e.io.Err, "the engines were not asked: write the name of their model for %s", unknownModel)
	tellNodeFlags(e, f.set)
	return f.settings.parse(e, app.Default(), "convert", f.settings.appendTo(e, text))
}

// tellNodeFlags says which flags are for the node that runs the application.
func tellNodeFlags(e *env, flags *pflag.FlagSet) {
	start := newStart(e).Flags()
	flags.Visit(func(flag *pflag.Flag) {
		switch {
		case flag.Name == "host" || flag.Name == "port":
			printMessage(e.io.Err, "--%s is for the node: `dpserve start --http-bind HOST:PORT`", flag.Name)
		case start.Lookup(flag.Name) != nil:
			printMessage(e.io.Err, "--%s is for the node: `dpserve start --%s`", flag.Name, flag.Name)
		}
	})
}
