package main

import (
	"strings"

	"github.com/spf13/cobra"
)

func newCompletion(e *env) *cobra.Command {
	shells := []string{"bash", "zsh", "fish", "powershell"}
	return &cobra.Command{
		Use:       "completion bash|zsh|fish|powershell",
		Short:     "shell completion",
		Long:      "completion prints a script for your shell. Load it for one session as above, or write it to your shell's completion folder.",
		Example:   "  source <(dpserve completion bash)",
		ValidArgs: shells,
		Args:      takes(1, "SHELL"),
		RunE: func(cmd *cobra.Command, args []string) error {
			root, out := cmd.Root(), e.io.Out
			switch args[0] {
			case "bash":
				return root.GenBashCompletionV2(out, true)
			case "zsh":
				return root.GenZshCompletion(out)
			case "fish":
				return root.GenFishCompletion(out, true)
			case "powershell":
				return root.GenPowerShellCompletionWithDesc(out)
			}
			return usageError("completion", "shell %q: wanted %s", args[0], strings.Join(shells, ", "))
		},
	}
}
