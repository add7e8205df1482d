package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// Defaults of --timeout for --wait.
const (
	rankAddTimeout    = 10 * time.Minute // engines load models
	rankRemoveTimeout = 35 * time.Minute // the longest default drain
)

func newRanks(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ranks COMMAND",
		Short: "attach and detach engines at run time, and make control calls to them",
		Long: `ranks add and ranks remove change which engines an application of kind attach stands for,
without a deploy. The change survives a restart of dpserve; the other ranks, their numbers and their streams
are not touched. A later deploy of the application's file makes it what the file says. ranks call makes a
control call to the engines of any application.`,
		Example: "  dpserve ranks add edge http://127.0.0.1:8102\n  dpserve ranks remove edge 0/2",
		Args:    cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError("ranks", "ranks has no command %q", args[0])
			}
			return cmd.Help()
		},
	}
	cmd.AddCommand(newRanksAdd(e), newRanksRemove(e), newRanksCall(e))
	return cmd
}

// rankSpec is the JSON form of an item of engine.ranks.
type rankSpec struct {
	URL        string    `json:"url"`
	Addressing string    `json:"addressing,omitempty"`
	Selector   *int      `json:"selector,omitempty"`
	Role       string    `json:"role,omitempty"`
	PD         *rankPD   `json:"pd,omitempty"`
	Node       string    `json:"node,omitempty"`
	KVEvents   *kvSocket `json:"kv_events,omitempty"`
}

// rankPD is the JSON form of the pd of a prefill rank.
type rankPD struct {
	EngineID    string `json:"engine_id,omitempty"`
	SideChannel string `json:"side_channel,omitempty"`
	TPSize      int    `json:"tp_size,omitempty"`
	Bootstrap   string `json:"bootstrap,omitempty"`
}

type kvSocket struct {
	Connect string `json:"connect,omitempty"`
	Bind    string `json:"bind,omitempty"`
	Replay  string `json:"replay,omitempty"`
}

func newRanksAdd(e *env) *cobra.Command {
	var spec rankSpec
	var kv kvSocket
	var pd rankPD
	var selector int
	w := &rankWait{timeout: rankAddTimeout}
	cmd := &cobra.Command{
		Use:   "add APP URL [flags]",
		Short: "attach one more engine",
		Long: `add attaches the engine at URL to an application of kind attach with independent ranks. It
gets the lowest free rank number and is in routing as soon as it answers, which may be later: dpserve goes
on asking. dns://HOST:PORT stands for all addresses of HOST, for example of a headless service: each of them
is a rank, added and removed as the answers of DNS change. Of an application with prefill and decode ranks,
--role says which pool it goes to, and the flags --pd-… what the transfer must know of a prefill rank.`,
		Example: `  dpserve ranks add edge http://127.0.0.1:8102 --wait
  dpserve ranks add edge dns://vllm.default.svc:8000
  dpserve ranks add pd http://127.0.0.1:8110 --role prefill
  dpserve ranks add edge http://127.0.0.1:8103 --kv-connect tcp://127.0.0.1:5557 ` +
			"--kv-replay tcp://127.0.0.1:5558",
		Args: requireArgs(2, "APP", "URL"),
	}
	flags := cmd.Flags()
	flags.StringVar(&spec.Addressing, "addressing", "",
		"url, header or body: how a rank is named behind a url of several (default url)")
	flags.IntVar(&selector, "selector", 0, "the `number` that is sent with --addressing header or body")
	flags.StringVar(&spec.Role, "role", "", "both, prefill or decode: what the rank does (default both)")
	flags.StringVar(&pd.Bootstrap, "pd-bootstrap", "",
		"`http://HOST:PORT` of a prefill rank's bootstrap server (transfers mooncake and sglang)")
	flags.StringVar(&pd.EngineID, "pd-engine-id", "", "`id` of a prefill rank's engine (transfer nixl-push)")
	flags.StringVar(&pd.SideChannel, "pd-side-channel", "",
		"`HOST:PORT` of a prefill rank's side channel (transfer nixl-push)")
	flags.IntVar(&pd.TPSize, "pd-tp-size", 0,
		"tensor parallel `size` of a prefill rank's engine (transfer nixl-push)")
	flags.StringVar(&spec.Node, "node", "", "dpserve `node` that talks to the engine")
	flags.StringVar(&kv.Connect, "kv-connect", "",
		"`tcp://HOST:PORT` where the engine publishes its KV events")
	flags.StringVar(&kv.Bind, "kv-bind", "",
		"`tcp://HOST:PORT` that the engine dials to publish its KV events")
	flags.StringVar(&kv.Replay, "kv-replay", "", "`tcp://HOST:PORT` of the engine's replay socket")
	w.flags(cmd, "until the rank is ready")
	w.output = addOutput(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var err error
		if spec.URL, err = attachURL("ranks add", "URL", args[1]); err != nil {
			return err
		}
		if flags.Changed("selector") {
			spec.Selector = &selector
		}
		if pd != (rankPD{}) {
			spec.PD = &pd
		}
		if kv != (kvSocket{}) {
			spec.KVEvents = &kv
		}
		return runRankAdd(cmd.Context(), e, args[0], &spec, w)
	}
	return cmd
}

func newRanksRemove(e *env) *cobra.Command {
	var deadline time.Duration
	w := &rankWait{timeout: rankRemoveTimeout}
	cmd := &cobra.Command{
		Use:   "remove APP URL|GROUP/RANK [flags]",
		Short: "drain an engine and detach it",
		Long: `remove takes a rank out of routing, lets its running streams end
(graceful_shutdown_timeout_s, or --deadline) and detaches it. The engine itself is not ended, and the other
ranks keep their numbers. The URL of a service takes all of its ranks with it. Of several ranks behind one
URL, name one as GROUP/RANK; if both pools of an application have it, APP is the pool, for example
pd.prefill.`,
		Example: `  dpserve ranks remove edge http://127.0.0.1:8100
  dpserve ranks remove edge 0/2 --deadline 30s --wait`,
		Args: requireArgs(2, "APP", "URL|GROUP/RANK"),
	}
	cmd.Flags().DurationVar(&deadline, "deadline", 0,
		"how long running streams may go on; 0s cuts them (default: graceful_shutdown_timeout_s)")
	w.flags(cmd, "until the rank is gone")
	w.output = addOutput(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		r, err := parseRankRemoval(args[1])
		if err != nil {
			return err
		}
		if cmd.Flags().Changed("deadline") {
			if deadline < 0 {
				return usageError("ranks remove", "--deadline %s: must not be negative", deadline)
			}
			r.Deadline = &deadline
		}
		return runRankRemove(cmd.Context(), e, args[0], r, w)
	}
	return cmd
}

// parseRankRemoval reads URL or GROUP/RANK.
func parseRankRemoval(s string) (r client.RankRemoval, err error) {
	if strings.Contains(s, "://") {
		r.URL, err = attachURL("ranks remove", "URL", s)
		return r, err
	}
	var ok bool
	if r.Group, r.Rank, ok = client.ParseRankName(s); !ok {
		return r, usageError("ranks remove", "%q: wanted http://HOST:PORT or GROUP/RANK", s)
	}
	return r, nil
}

// rankWait holds the flags that say whether and how long a command waits for its change, and how it prints
// the answer.
type rankWait struct {
	wait    bool
	timeout time.Duration
	output  *format
}

func (w *rankWait) flags(cmd *cobra.Command, what string) {
	cmd.Flags().BoolVar(&w.wait, "wait", false, "wait "+what)
	cmd.Flags().DurationVar(&w.timeout, "timeout", w.timeout, "how long to wait; then exit code 8")
}

func runRankAdd(ctx context.Context, e *env, name string, spec *rankSpec, w *rankWait) error {
	text, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("write the rank: %w", err)
	}
	return changeRanks(ctx, e, w, "added",
		func(cluster admin) (client.RankChange, error) { return cluster.AddRank(ctx, name, text) },
		func(a *client.AppStatus, c *client.RankChange) bool {
			return rankPhase(a, c) == string(state.Ready) || c.Service && a.Status == client.StatusRunning
		})
}

func runRankRemove(ctx context.Context, e *env, name string, r client.RankRemoval, w *rankWait) error {
	return changeRanks(ctx, e, w, "removed",
		func(cluster admin) (client.RankChange, error) { return cluster.RemoveRank(ctx, name, r) },
		func(a *client.AppStatus, c *client.RankChange) bool { return rankPhase(a, c) == "" })
}

// rankPhase returns the phase of a rank, "" if the application does not list the rank.
func rankPhase(a *client.AppStatus, c *client.RankChange) string {
	for r := range allRanks([]client.AppStatus{*a}) {
		if r.name() == rankName(c) {
			return r.rank.Phase
		}
	}
	return ""
}

// rankName returns APP/GROUP/RANK, and APP of a service. Of a rank of a pool, APP is the pool's name.
func rankName(c *client.RankChange) string {
	if c.Service {
		return app.PoolName(c.App, c.Pool)
	}
	return fmt.Sprintf("%s/%d/%d", app.PoolName(c.App, c.Pool), c.Group, c.Rank)
}

// changeRanks makes a change, waits for it with --wait, and prints it.
func changeRanks(ctx context.Context, e *env, w *rankWait, verb string,
	change func(admin) (client.RankChange, error), done func(*client.AppStatus, *client.RankChange) bool,
) error {
	if w.timeout <= 0 {
		return usageError("ranks", "--timeout %s: must be positive", w.timeout)
	}
	return e.withAdmin(func(cluster admin) error {
		c, err := change(cluster)
		if err != nil {
			return err
		}
		printMessage(e.io.Err, "%s %s %s", verb, rankName(&c), describeEngine(&c))
		if w.wait {
			if err := awaitRank(ctx, e, cluster, w.timeout, &c, done); err != nil {
				return err
			}
		}
		return rankListing(&c).write(e.io, *w.output)
	})
}

func describeEngine(c *client.RankChange) string {
	if c.Selector == nil {
		return c.URL
	}
	return fmt.Sprintf("%s selector %d", c.URL, *c.Selector)
}

// awaitRank polls the application until the change is done.
func awaitRank(ctx context.Context, e *env, cluster admin, timeout time.Duration, c *client.RankChange,
	done func(*client.AppStatus, *client.RankChange) bool,
) error {
	waiting, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err := newMonitor(e, cluster, e.screen()).pollUntil(waiting, []string{c.App},
		func(apps []client.AppStatus) (bool, error) {
			i := slices.IndexFunc(apps, func(a client.AppStatus) bool { return a.Name == c.App })
			if i < 0 {
				return true, problem.New(problem.Conflict, "%s was deleted meanwhile", c.App).
					WithHint("deploy it again if that was not meant")
			}
			return apps[i].Revision >= c.Revision && done(&apps[i], c), nil
		})
	switch {
	case errors.Is(err, errInterrupted):
		return interrupted(e, "the change goes on, watch it with `dpserve status "+c.App+" -w`")
	case errors.Is(err, context.DeadlineExceeded):
		return problem.New(problem.Timeout, "%s is not there yet; the change goes on", rankName(c)).
			WithHint("watch it with `dpserve status %s -w`", c.App)
	}
	return err
}

func rankListing(c *client.RankChange) *listing {
	name := rankName(c)
	return &listing{document: c, names: []string{name}, table: func(bool) []*table {
		t := &table{head: []string{"RANK", "ENGINE", "REVISION"}}
		t.add(cells(name, describeEngine(c), fmt.Sprint(c.Revision))...)
		return []*table{t}
	}}
}
