package main

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/server"
	"github.com/dpserve/dpserve/routing"
)

// Bounds of a completion. A shell waits for it, and shows no list that is longer.
const (
	completionTimeout = time.Second
	maxCompletions    = 200
)

// candidates lists the words for one argument. args are the arguments before it.
type candidates func(ctx context.Context, cluster admin, args []string) ([]cobra.Completion, error)

// addCompletions gives every command the words that its shell completion offers.
func addCompletions(e *env, root *cobra.Command) {
	byCommand := map[string]cobra.CompletionFunc{
		"up": completeFiles, "validate": completeFiles, "convert": completeFiles,
		"plan": completeFiles, "deploy": completeFiles,
		"doctor": completeFiles, "simulate": completeFiles,
		"status": complete(e, appNames), "delete": complete(e, appNames), "logs": complete(e, logTargets),
		"events":        complete(e, appNames),
		"route explain": complete(e, appNames), "router show": complete(e, appNames),
		"router reset": complete(e, appNames), "ranks add": complete(e, attachedApps),
		"ranks remove": complete(e, attachedApps, attachedRanks), "drain": complete(e, nodeNames),
		"undrain": complete(e, nodeNames), "nodes remove": complete(e, nodeNames),
		"ranks call": complete(e, appNames),
		"history":    complete(e, appNames), "get": complete(e, appNames), "rollback": complete(e, appNames),
		"token revoke": complete(e, tokenIDs),
	}
	byFlag := map[string][]cobra.Completion{
		"engine": {engineSim}, "roles": server.AllRoles(), "on-lease-loss": {"serve", "fence"},
		"from": knownPrograms, "policy": routing.Names(), "identity": {app.IdentityText, app.IdentityTokens},
		"ray-num-replicas": {app.RayGroups, app.RayRanks},
		"log-format":       {"text", "json"}, "log-level": {"debug", "info", "warn", "error"},
	}
	for cmd := range allCommands(root) {
		switch words := byCommand[commandName(cmd)]; {
		case words != nil:
			cmd.ValidArgsFunction = words
		case len(cmd.ValidArgs) == 0 && cmd.ValidArgsFunction == nil:
			cmd.ValidArgsFunction = cobra.NoFileCompletions
		}
		for flag, words := range byFlag {
			if cmd.Flags().Lookup(flag) != nil {
				_ = cmd.RegisterFlagCompletionFunc(flag, // only an unknown flag is an error
					cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
			}
		}
	}
}

// cleanUsages removes the marks of value names from the texts of flags, which a shell would show as they are.
func cleanUsages(root *cobra.Command) {
	clean := func(f *pflag.Flag) { f.Usage = strings.ReplaceAll(f.Usage, "`", "") }
	root.PersistentFlags().VisitAll(clean)
	for cmd := range allCommands(root) {
		cmd.Flags().VisitAll(clean)
	}
}

// completeFiles offers application files.
func completeFiles(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return []cobra.Completion{"yaml", "yml", "json"}, cobra.ShellCompDirectiveFilterFileExt
}

// complete asks the cluster for the words of each argument. Whatever fails, it offers nothing and says
// nothing.
func complete(e *env, arguments ...candidates) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string,
	) ([]cobra.Completion, cobra.ShellCompDirective) {
		const end = cobra.ShellCompDirectiveNoFileComp
		if len(args) >= len(arguments) {
			return nil, end
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), completionTimeout)
		defer cancel()
		var words, out []cobra.Completion
		if err := e.withAdmin(func(cluster admin) (err error) {
			words, err = arguments[len(args)](ctx, cluster, args)
			return err
		}); err != nil {
			return nil, end
		}
		for _, w := range words {
			if strings.HasPrefix(w, prefix) && len(out) < maxCompletions {
				out = append(out, w)
			}
		}
		return out, end
	}
}

func appNames(ctx context.Context, cluster admin, _ []string) ([]cobra.Completion, error) {
	apps, err := cluster.Apps(ctx)
	return describeApps(apps), err
}

func describeApps(apps []client.AppStatus) []cobra.Completion {
	var out []cobra.Completion
	for i := range apps {
		a := &apps[i]
		out = append(out, cobra.CompletionWithDesc(a.Name,
			a.Status+" "+formatUsed(a.Ready, a.Desired)+" "+a.Kind))
	}
	return out
}

// logTargets lists applications, then their ranks.
func logTargets(ctx context.Context, cluster admin, _ []string) ([]cobra.Completion, error) {
	apps, err := cluster.Apps(ctx)
	out := describeApps(apps)
	for r := range allRanks(apps) {
		out = append(out, cobra.CompletionWithDesc(r.name(), strings.TrimSpace(r.rank.Phase+" "+r.rank.Node)))
	}
	return out, err
}

func attachedApps(ctx context.Context, cluster admin, _ []string) ([]cobra.Completion, error) {
	apps, err := cluster.Apps(ctx)
	isOther := func(a client.AppStatus) bool { return a.Kind != string(app.KindAttach) }
	return describeApps(slices.DeleteFunc(apps, isOther)), err
}

// attachedRanks lists the ranks of the application that args name, as GROUP/RANK; those of pools by their
// URL.
func attachedRanks(ctx context.Context, cluster admin, args []string) ([]cobra.Completion, error) {
	apps, err := fetchApps(ctx, cluster, args)
	var out []cobra.Completion
	for r := range allRanks(apps) {
		number, isOwn := strings.CutPrefix(r.name(), args[0]+"/")
		if !isOwn { // a number may be a rank of both pools
			number = r.rank.URL
		}
		out = append(out, cobra.CompletionWithDesc(number, r.rank.URL))
	}
	return out, err
}

func tokenIDs(ctx context.Context, cluster admin, _ []string) ([]cobra.Completion, error) {
	tokens, err := cluster.Tokens(ctx)
	var out []cobra.Completion
	for i := range tokens {
		out = append(out, cobra.CompletionWithDesc(tokens[i].ID, tokens[i].Status))
	}
	return out, err
}

func nodeNames(ctx context.Context, cluster admin, _ []string) ([]cobra.Completion, error) {
	nodes, err := cluster.Nodes(ctx)
	var out []cobra.Completion
	for i := range nodes {
		out = append(out, cobra.CompletionWithDesc(nodes[i].Node, nodes[i].State))
	}
	return out, err
}
