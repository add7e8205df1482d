package main

import (
	"io"
	"strings"

	"github.com/spf13/cobra"
)

// plainBash follows cobra's script for bash, which calls two functions of the package bash-completion. Where
// the package is missing, these stand for them: the first returns the words of the line, in which bash has
// split those with = and : in them, the second offers files with one of the endings of $1.
const plainBash = `
if ! declare -F _get_comp_words_by_ref >/dev/null; then
    __dpserve_init_completion()
    {
        local i word rest=$COMP_LINE
        COMPREPLY=()
        words=()
        for ((i = 0; i <= COMP_CWORD; i++)); do
            word=${COMP_WORDS[i]}
            if ((i == 0)) || [[ $rest == [[:space:]]* ]]; then
                words+=("$word")
            else
                words[${#words[@]}-1]+=$word
            fi
            rest=${rest#"${rest%%[![:space:]]*}"}
            rest=${rest#"$word"}
        done
        cword=$((${#words[@]} - 1))
        cur=${words[cword]}
        prev=${words[cword > 0 ? cword - 1 : 0]}
    }
fi
if ! declare -F _filedir >/dev/null; then
    _filedir()
    {
        local file
        compopt -o filenames 2>/dev/null
        while IFS= read -r file; do
            if [[ -d $file || ${file##*.} == @($1) ]]; then
                COMPREPLY+=("$file")
            fi
        done < <(compgen -f -- "$cur")
    }
fi
`

func newCompletion(e *env) *cobra.Command {
	shells := []string{"bash", "zsh", "fish", "powershell"}
	return &cobra.Command{
		Use:   "completion bash|zsh|fish|powershell",
		Short: "shell completion",
		Long: "completion prints a script for your shell. Load it for one session as above, or write " +
			"it to your shell's completion folder. The script of bash needs bash 4 and nothing else.",
		Example:   "  source <(dpserve completion bash)",
		ValidArgs: shells,
		Args:      requireArgs(1, "SHELL"),
		RunE: func(cmd *cobra.Command, args []string) error {
			root, out := cmd.Root(), e.io.Out
			switch args[0] {
			case "bash":
				if err := root.GenBashCompletionV2(out, true); err != nil {
					return err
				}
				_, err := io.WriteString(out, plainBash)
				return err
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
