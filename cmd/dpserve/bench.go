package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/loadgen"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/tracefile"
)

type benchFlags struct {
	config       loadgen.Config
	conversation loadgen.Conversation
	keyEnv       string
	direct       string // --overhead
	whole        bool
	record       string // file
	output       *format

	sessions bool // --sessions is given
}

func newBench(e *env) *cobra.Command {
	f := &benchFlags{}
	cmd := &cobra.Command{
		Use:   "bench [URL] [flags]",
		Short: "send load to an OpenAI endpoint and measure what its clients see",
		Long: `bench measures time to first token, between tokens and end to end. With --rate it is an open
loop, in which a slow server cannot slow the clients down; without it a closed loop of --concurrency
clients. Failed requests end it with exit code 1. Without URL the load goes to the endpoint of the node that
DPSERVE_ADDR selects.

With --sessions it plays chats of several turns with shared system prompts. Each turn sends the whole
history with the answers it got, and names its session in x-session-id. The report tells which share of the
prompt tokens the engines had cached, and which share one perfect cache without limit would have had. Equal
seeds say the same: against engines that saw a run, take another --seed.`,
		Example: `  dpserve bench --rate 20 --duration 30s
  dpserve bench http://127.0.0.1:8000 --concurrency 64 --requests 1000 -o json
  dpserve bench http://127.0.0.1:8000 --sessions 40`,
		Args: requireArgs(0, "URL"),
	}
	f.add(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		err := f.checkSessions(cmd)
		if err != nil {
			return err
		}
		url := strings.Join(args, "")
		if f.config.URL, err = endpointURL(cmd.Context(), e, "bench", "URL", url); err != nil {
			return err
		}
		if f.direct != "" {
			if f.direct, err = engineURL("bench", "--overhead", f.direct); err != nil {
				return err
			}
		}
		return runBench(cmd.Context(), e, f)
	}
	return cmd
}

// endpointURL returns the URL of the command line, where it is called what, else the endpoint of the node
// that DPSERVE_ADDR selects.
func endpointURL(ctx context.Context, e *env, cmd, what, given string) (url string, err error) {
	if given != "" {
		return engineURL(cmd, what, given)
	}
	err = e.withAdmin(func(cluster admin) error {
		v, err := cluster.Version(ctx)
		if err != nil {
			return err
		}
		if v.Endpoint == "" {
			return problem.New(problem.InvalidArgument, "the node at DPSERVE_ADDR names no endpoint").
				WithHint("it has not role ingress, or runs another version: write %s %s", cmd, what)
		}
		url = v.Endpoint
		return nil
	})
	return url, err
}

func (f *benchFlags) add(cmd *cobra.Command) {
	c, flags := &f.config, cmd.Flags()
	flags.StringVar(&c.Model, "model", "", "name to send; default: the first the endpoint lists")
	flags.Float64Var(&c.Rate, "rate", 0, "requests per second of an open loop")
	flags.StringVar((*string)(&c.Arrivals), "arrivals", string(loadgen.Poisson),
		"open loop: poisson or uniform")
	flags.IntVar(&c.Concurrency, "concurrency", 0,
		"clients of a closed loop (default 16), or most requests in flight of an open one")
	flags.IntVar(&c.Requests, "requests", 0, "requests to measure; 0 = until --duration is over")
	flags.DurationVar(&c.Duration, "duration", 0,
		"length of the measurement (default 10s, if neither --requests nor --sessions is given)")
	flags.DurationVar(&c.Warmup, "warmup", 0, "time before it that is not measured")
	flags.IntVar(&c.PromptTokens, "prompt-tokens", 0, "length of prompts in tokens of 4 bytes")
	flags.IntVar(&c.PromptBytes, "prompt-bytes", 0, "length of prompts in bytes (default 256)")
	flags.IntVar(&c.MaxTokens, "max-tokens", loadgen.DefaultMaxTokens, "tokens to ask for")
	flags.BoolVar(&c.IgnoreEOS, "ignore-eos", false, "ask for exactly --max-tokens")
	flags.BoolVar(&f.whole, "no-stream", false, "whole answers instead of streams")
	flags.StringVar((*string)(&c.Route), "route", string(loadgen.Chat), "chat or completions")
	flags.Uint64Var(&c.Seed, "seed", 1, "of arrivals and prompts")
	flags.DurationVar(&c.Timeout, "timeout", loadgen.DefaultTimeout, "of one request")
	flags.DurationVar(&c.SLO.TTFT, "slo-ttft", loadgen.DefaultTTFT, "limit of the first token for goodput")
	flags.DurationVar(&c.SLO.TPOT, "slo-tpot", loadgen.DefaultTPOT,
		"limit of the mean gap between tokens for goodput")
	flags.IntSliceVar(&c.PIDs, "pid", nil, "`PIDS` of processes whose CPU time is charged to the run (Linux)")
	flags.StringVar(&f.direct, "overhead", "",
		"`URL` of the engine behind the endpoint: measure what the endpoint adds, both in turns")
	addKeyFlag(flags, &f.keyEnv)
	flags.StringVar(&f.record, "record", "",
		"`FILE` for a trace of what was sent, for dpserve simulate: times, lengths and hashes, no text")
	f.addSessions(flags)
	f.output = addOutput(cmd)
}

func addKeyFlag(flags *pflag.FlagSet, name *string) {
	flags.StringVar(name, "api-key-env", "", "`name` of the environment variable that holds the API key")
}

// keyOf returns the key in the variable of --api-key-env, "" without the flag.
func keyOf(e *env, variable string) (string, error) {
	key := ""
	if variable != "" {
		key = e.getenv(variable)
	}
	if variable != "" && key == "" {
		return "", problem.New(problem.InvalidArgument, "--api-key-env %s: the variable is empty", variable).
			WithHint("export %s=KEY", variable)
	}
	return key, nil
}

// firstModel returns the first model that an endpoint lists.
func firstModel(ctx context.Context, url, keyEnv string) (string, error) {
	found, err := probeURLs(ctx, []string{url}, probeWith(app.Engine{APIKeyEnv: keyEnv}))
	if err != nil {
		return "", err
	}
	return found[0].Models[0], nil
}

func runBench(ctx context.Context, e *env, f *benchFlags) error {
	c := f.config
	c.Stream = !f.whole
	var err error
	if c.APIKey, err = keyOf(e, f.keyEnv); err != nil {
		return err
	}
	if c.Model == "" {
		if c.Model, err = firstModel(ctx, c.URL, f.keyEnv); err != nil {
			return err
		}
	}
	if f.record != "" {
		options := &slog.HandlerOptions{Level: slog.LevelWarn}
		trace, err := tracefile.Create(f.record, slog.New(slog.NewTextHandler(e.io.Err, options)))
		if err != nil {
			return problem.New(problem.InvalidArgument, "--record: %w", err).
				WithHint("name a file in a folder that you may write")
		}
		defer func() {
			trace.Close()
			printMessage(e.io.Err, "the trace is in %s", trace.Path())
		}()
		c.Record = recordSent(trace, c.Route)
	}
	if f.direct != "" {
		return benchOverhead(ctx, e, c, f)
	}
	var report *loadgen.Report
	if f.sessions {
		report, err = loadgen.RunSessions(ctx, c, f.conversation)
	} else {
		report, err = loadgen.Run(ctx, c)
	}
	if report == nil {
		return err
	}
	return errors.Join(writeReport(e, report, c.Model, *f.output), err,
		failedRequests(report.Failed, report.Offered))
}

// recordSent returns what records a request of bench in a trace. Where the engine does not count the prompt,
// a token is 4 bytes.
func recordSent(trace *tracefile.Recorder, route loadgen.Route) func(*loadgen.Sent) {
	kind := openai.Chat
	if route == loadgen.Completions {
		kind = openai.Completions
	}
	return func(s *loadgen.Sent) {
		var scan openai.Body
		if scan.Scan(kind, s.Body) != nil {
			return
		}
		text := scan.Text(s.Body)
		trace.Add(tracefile.Request{
			At: s.At, Input: cmp.Or(s.Prompt, scan.PromptBytes/4), Output: s.Output,
			Blocks: trace.Hashes("", nil, text),
		})
	}
}

// benchOverhead compares the endpoint with the engine behind the endpoint.
func benchOverhead(ctx context.Context, e *env, proxied loadgen.Config, f *benchFlags) error {
	direct := proxied
	direct.URL, direct.Record = f.direct, nil
	if _, err := probeURLs(ctx, []string{f.direct}, probeWith(app.Engine{})); err != nil {
		return err
	}
	report, err := loadgen.RunOverhead(ctx, direct, proxied)
	if report == nil {
		return err
	}
	return errors.Join(writeReport(e, report, proxied.Model, *f.output), err, failedRuns(report))
}

// failedRuns is an error if a run of the comparison had failed requests, so that scripts see it.
func failedRuns(o *loadgen.Overhead) error {
	failed := 0
	for i := range o.Runs {
		if len(o.Runs[i].Errors) > 0 {
			failed++
		}
	}
	if failed == 0 {
		return nil
	}
	return problem.New(problem.Upstream, "requests failed in %d of %s", failed,
		formatCount(len(o.Runs), "run")).WithHint("the report lists the kinds of errors")
}

// benchResult is a result of loadgen: it marshals to JSON and writes a table.
type benchResult interface{ WriteTable(w io.Writer) error }

func writeReport(e *env, r benchResult, model string, f format) error {
	if !f.isTable() {
		return writeDocument(e.io.Out, f, r, []string{model})
	}
	return r.WriteTable(e.io.Out)
}

// failedRequests is an error if requests failed, so that scripts see it.
func failedRequests(failed, offered int) error {
	if failed == 0 && offered > 0 {
		return nil
	}
	return problem.New(problem.Upstream, "%d of %s failed", failed, formatCount(offered, "request")).
		WithHint("the report lists the kinds of errors")
}

// sessionFlags are the flags of multi-turn load. They are valid only beside --sessions.
func sessionFlags(conversation *loadgen.Conversation) *pflag.FlagSet {
	flags := pflag.NewFlagSet("sessions", pflag.ContinueOnError)
	flags.IntVar(&conversation.Turns, "turns", loadgen.DefaultTurns, "sessions: turns of each")
	flags.IntVar(&conversation.SystemPrompts, "system-prompts", loadgen.DefaultSystemPrompts,
		"sessions: different system prompts, of which the first ones are popular; 0 = none")
	flags.IntVar(&conversation.SystemTokens, "system-tokens", loadgen.DefaultSystemTokens,
		"sessions: length of a system prompt in tokens of 4 bytes")
	flags.IntVar(&conversation.TurnTokens, "turn-tokens", loadgen.DefaultTurnTokens,
		"sessions: mean length of a user's message")
	flags.DurationVar(&conversation.Think, "think", loadgen.DefaultThink,
		"sessions: mean pause between an answer and the next message")
	flags.Float64Var(&conversation.LongShare, "long-share", 0,
		"sessions: share of them that open with a document, 0 to 1")
	flags.IntVar(&conversation.LongTokens, "long-tokens", 0, "sessions: length of that document")
	return flags
}

// addSessions adds --sessions and its flags.
func (f *benchFlags) addSessions(flags *pflag.FlagSet) {
	flags.IntVar(&f.conversation.Sessions, "sessions", 0,
		"play so many chats of several turns; --rate is then new sessions per second (default 4)")
	flags.AddFlagSet(sessionFlags(&f.conversation))
}

// checkSessions refuses flags that the chosen mode ignores.
func (f *benchFlags) checkSessions(cmd *cobra.Command) error {
	var wrong []string
	refuse := func(names ...string) {
		for _, name := range names {
			if cmd.Flags().Changed(name) {
				wrong = append(wrong, "--"+name)
			}
		}
	}
	if f.sessions = cmd.Flags().Changed("sessions"); f.sessions {
		refuse("overhead", "requests", "prompt-tokens", "prompt-bytes", "route", "no-stream")
		if len(wrong) > 0 {
			return usageError("bench", "%s and --sessions exclude each other", strings.Join(wrong, ", "))
		}
		return nil
	}
	sessionFlags(&loadgen.Conversation{}).VisitAll(func(flag *pflag.Flag) { refuse(flag.Name) })
	if len(wrong) > 0 {
		return problem.New(problem.InvalidArgument, "%s: only sessions have that", strings.Join(wrong, ", ")).
			WithHint("add --sessions N")
	}
	return nil
}
