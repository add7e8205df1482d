package main

import (
	"errors"
	"iter"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dpserve/dpserve/internal/nearest"
	"github.com/dpserve/dpserve/internal/problem"
)

// helpTemplate says what a command does, then how it is called, with examples, then the flags.
const helpTemplate = `{{with (or .Long .Short)}}{{. | trimTrailingWhitespaces}}

{{end}}Usage:
  {{.UseLine}}
{{with .Example}}
Examples:
{{. | trimTrailingWhitespaces}}
{{end}}{{if .HasAvailableSubCommands}}
{{if not .Groups}}Commands:{{range .Commands}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}
{{end}}{{range $i, $group := .Groups}}{{if $i}}
{{end}}{{.Title}}{{range $.Commands}}{{if and .IsAvailableCommand (eq .GroupID $group.ID)}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}
{{end}}{{end}}{{if .HasAvailableLocalFlags}}
Flags:
{{.LocalFlags.FlagUsages | trimTrailingWhitespaces}}
{{end}}{{if .HasAvailableInheritedFlags}}
Everywhere:
{{.InheritedFlags.FlagUsages | trimTrailingWhitespaces}}
{{end}}`

const rootLong = `dpserve serves data-parallel LLM engines behind one OpenAI endpoint: it starts one engine
per rank, hands out the ranks, routes each request to the rank where it does the most good, and restarts
what dies.

--addr, else DPSERVE_ADDR, names a node of the cluster that a command asks (default ` + defaultAddr + `):
HOST, HOST:PORT, :PORT or a URL; the port of HOST is 8265. up, start, join, recover, validate, convert
and simulate ask none. A node keeps a token in admin.token of its data folder and wants it from whoever
asks; the commands of the node's own user find it by themselves.

With -o json an error is one line of JSON, the last one on stderr: {"apiVersion", "error": {"code",
"message", "hint", "details", "faults", "exit_code"}}.

Exit codes: 0 ok, 1 error, 2 usage or validation, 3 differs (only with --exit-code), 4 authentication,
5 cannot be rolled out, 8 still pending at the timeout, 130 interrupted.`

// program is the name of the root command.
const program = "dpserve"

func newRoot(e *env) *cobra.Command {
	root := &cobra.Command{
		Use:   program + " COMMAND",
		Short: "data-parallel LLM serving behind one OpenAI endpoint",
		Long:  rootLong,
		// cobra adds --version and -v
		Version: readBuildInfo().Version,
		Example: `  dpserve up                                   # four simulated ranks, no GPU needed
  dpserve up examples/quickstart/app.yaml      # the same from a file`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		Args:              cobra.ArbitraryArgs,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return prepare(e, cmd) },
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return unknownCommand(cmd, args[0])
			}
			return cmd.Help()
		},
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.PersistentFlags().StringVar(&e.addr, "addr", "",
		"`ADDRESS` of the admin API: HOST, HOST:PORT or URL (default DPSERVE_ADDR, else "+defaultAddr+")")
	root.PersistentFlags().StringVar(&e.adminTokenFile, "admin-token-file", "",
		"`FILE` with the token of the admin API; default: "+adminTokenVariable+
			", else that of this user's node")
	root.PersistentFlags().BoolVar(&e.noColor, "no-color", false, "no colour (NO_COLOR does the same)")
	root.SetHelpTemplate(helpTemplate)
	root.SetFlagErrorFunc(flagError)
	root.SetHelpCommand(newHelp(root))
	root.SetVersionTemplate(program + " {{.Version}}\n")
	addGroups(root, []group{
		{"Start here:", []*cobra.Command{newUp(e), newServe(e), newChat(e), newBench(e), newDoctor(e)}},
		{"Files:", []*cobra.Command{newValidate(e), newConvert(e), newPlan(e), newGet(e), newHistory(e)}},
		{"Applications:", []*cobra.Command{
			newDeploy(e), newRollback(e), newDelete(e), newStatus(e), newEvents(e), newLogs(e), newRanks(e),
		}},
		{"Routing:", []*cobra.Command{newRoute(e), newRouter(e), newSimulate(e)}},
		{"Nodes:", []*cobra.Command{
			newStart(e), newJoin(e), newToken(e), newNodes(e), newDrain(e), newUndrain(e), newRestart(e),
			newLeave(e), newRecover(e),
		}},
		{"This program:", []*cobra.Command{newVersion(e), newCompletion(e)}},
	})
	addReading(e, root)
	root.DisableFlagsInUseLine = true
	for cmd := range allCommands(root) {
		cmd.DisableFlagsInUseLine = true
	}
	addCompletions(e, root)
	return root
}

// group is a subject of the list of commands.
type group struct {
	title    string
	commands []*cobra.Command
}

func addGroups(root *cobra.Command, groups []group) {
	for _, g := range groups {
		root.AddGroup(&cobra.Group{ID: g.title, Title: g.title})
		for _, cmd := range g.commands {
			cmd.GroupID = g.title
			root.AddCommand(cmd)
		}
	}
}

// allCommands yields every command below cmd.
func allCommands(cmd *cobra.Command) iter.Seq[*cobra.Command] {
	return func(yield func(*cobra.Command) bool) {
		for _, sub := range cmd.Commands() {
			if !yield(sub) {
				return
			}
			for deeper := range allCommands(sub) {
				if !yield(deeper) {
					return
				}
			}
		}
	}
}

// prepare applies the flags that all commands have.
func prepare(e *env, cmd *cobra.Command) error {
	if e.noColor {
		e.io.Color = false
	}
	if cmd.Flags().Changed("addr") && slices.Contains([]string{"up", "serve", "start", "join"}, cmd.Name()) {
		return problem.New(problem.InvalidArgument,
			"%s runs a node of its own, and --addr names one that runs", cmd.Name()).
			WithHint("see `dpserve help %s` for the addresses at which it listens", cmd.Name())
	}
	return nil
}

func newHelp(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use:     "help [COMMAND]",
		Short:   "help on a command",
		Example: "  dpserve help deploy",
		ValidArgsFunction: func(*cobra.Command, []string, string,
		) ([]cobra.Completion, cobra.ShellCompDirective) {
			return commandNames(root), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(_ *cobra.Command, args []string) error {
			cmd, rest, err := root.Find(args)
			if err != nil || len(rest) > 0 || cmd == root && len(args) > 0 {
				return unknownCommand(root, strings.Join(args, " "))
			}
			cmd.InitDefaultHelpFlag()
			return cmd.Help()
		},
	}
}

func unknownCommand(root *cobra.Command, name string) error {
	err := problem.New(problem.InvalidArgument, "unknown command %q", name)
	if hint := otherCommands[name]; hint != "" && root.Parent() == nil {
		return err.WithHint("%s", hint)
	}
	if near := nearest.Word(name, commandNames(root)); near != "" {
		return err.WithHint("did you mean `%s %s`?", root.CommandPath(), near)
	}
	return err.WithHint("`%s` lists the commands",
		strings.Replace(root.CommandPath(), program, program+" help", 1))
}

func commandNames(root *cobra.Command) []string {
	var names []string
	for _, c := range root.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	return names
}

// flagError converts pflag's errors to problem.Error. An unknown flag gets a did-you-mean hint. What a flag
// says of its value itself stays as it is.
func flagError(cmd *cobra.Command, err error) error {
	if own, ok := errors.AsType[*problem.Error](err); ok {
		return own
	}
	if missing, ok := errors.AsType[*pflag.NotExistError](err); ok {
		if hint := otherFlags[missing.GetSpecifiedName()]; hint != "" {
			return problem.New(problem.InvalidArgument, "%s", err.Error()).WithHint("%s", hint)
		}
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if near := nearest.Word(missing.GetSpecifiedName(), names); near != "" {
			return problem.New(problem.InvalidArgument, "%s", err.Error()).
				WithHint("did you mean --%s?", near)
		}
	}
	return usageError(commandName(cmd), "%s", err.Error())
}

// requireArgs checks positional arguments: at least the first least names are given, and no more than all of
// them.
func requireArgs(least int, names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < least:
			return usageError(commandName(cmd), "%s wants %s", commandName(cmd),
				strings.Join(names[len(args):least], " "))
		case len(args) > len(names) && len(names) == 0:
			return usageError(commandName(cmd), "%s takes no argument, got %q", commandName(cmd), args[0])
		case len(args) > len(names):
			return usageError(commandName(cmd), "%s takes %s and nothing more, got %q", commandName(cmd),
				strings.Join(names, " "), args[len(names)])
		}
		return nil
	}
}

// commandName returns the command's name without the leading "dpserve", as `dpserve help NAME` accepts it.
func commandName(cmd *cobra.Command) string {
	return strings.TrimPrefix(cmd.CommandPath(), program+" ")
}
