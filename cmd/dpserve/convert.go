package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/internal/app"
)

func newConvert(e *env) *cobra.Command {
	from := ""
	cmd := &cobra.Command{
		Use:   "convert FILE | --from PROGRAM -- ARGS",
		Short: "print a Ray Serve LLM file, or another program's command line, as an app.yaml, offline",
		Long: `convert reads a file for Ray Serve LLM, or the configuration of one of its models, and
prints it as an app.yaml. Comments at its top name each key that has no effect or another meaning here,
with its place. deploy, plan, validate and up read such files too. FILE may be - for stdin. Faults end it
with exit code 2.

With --from it reads the command line behind --, of SGLang's router or server, vLLM, Dynamo or Furiosa-LLM, as
serve and up read it. Where the engines run already and are only named, it asks none of them: the file then
has MODEL where the name of their model stands.`,
		Example: `  dpserve convert llm.yaml > app.yaml
  dpserve convert --from sglang-router -- --worker-urls http://w1:30000 http://w2:30000 --policy cache_aware
  dpserve convert --from vllm -- vllm serve Qwen/Qwen3-8B --data-parallel-size 4`,
		Args: func(cmd *cobra.Command, args []string) error {
			switch {
			case from == "":
				return requireArgs(1, "FILE")(cmd, args)
			case !slices.Contains(knownPrograms, from):
				return usageError("convert", "--from %q: wanted %s", from, strings.Join(knownPrograms, ", "))
			case len(args) == 0:
				return usageError("convert", "--from wants the command line of the program behind --")
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			if from != "" {
				return convertLine(e, from, args)
			}
			return runConvert(e, args[0])
		},
	}
	cmd.Flags().StringVar(&from, "from", "", "`program` whose command line stands behind --: "+
		strings.Join(knownPrograms, ", "))
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if from != "" {
			return usageError("convert", "%v: the command line of --from stands behind --", err)
		}
		return flagError(cmd, err)
	})
	return cmd
}

func runConvert(e *env, path string) error {
	text, err := readFile(e, path)
	if err != nil {
		return err
	}
	file, notes, err := parseFile(e, app.Default(), path, text)
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
