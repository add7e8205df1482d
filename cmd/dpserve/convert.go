package main

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/internal/app"
)

func newConvert(e *env) *cobra.Command {
	return &cobra.Command{
		Use:   "convert FILE",
		Short: "print a Ray Serve LLM file as an app.yaml, offline",
		Long: `convert reads a file for Ray Serve LLM, or the configuration of one of its models, and
prints it as an app.yaml. Comments at its top name each key that has no effect or another meaning here,
with its place. deploy, plan, validate and up read such files too. FILE may be - for stdin. Faults end it
with exit code 2.`,
		Example: `  dpserve convert llm.yaml > app.yaml`,
		Args:    requireArgs(1, "FILE"),
		RunE:    func(_ *cobra.Command, args []string) error { return runConvert(e, args[0]) },
	}
}

func runConvert(e *env, path string) error {
	text, err := readFile(e, path)
	if err != nil {
		return err
	}
	file, notes, err := app.ParseWith(app.Default(), path, text, besideOf(path))
	if err != nil {
		return err
	}
	var b strings.Builder
	for _, n := range notes {
		b.WriteString("# " + strings.ReplaceAll(n.String(), "\n", " ") + "\n")
	}
	b.Write(file.Print())
	_, err = e.io.Out.Write([]byte(b.String()))
	return err
}
