package main

import (
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/loadgen"
)

// sessionFlags shape the multi-turn load; they mean something only beside --sessions.
func sessionFlags(talk *loadgen.Conversation) *pflag.FlagSet {
	flags := pflag.NewFlagSet("sessions", pflag.ContinueOnError)
	flags.IntVar(&talk.Turns, "turns", loadgen.DefaultTurns, "sessions: turns of each")
	flags.IntVar(&talk.SystemPrompts, "system-prompts", loadgen.DefaultSystemPrompts, "sessions: different system prompts, of which the first ones are popular; 0 = none")
	flags.IntVar(&talk.SystemTokens, "system-tokens", loadgen.DefaultSystemTokens, "sessions: length of a system prompt in tokens of 4 bytes")
	flags.IntVar(&talk.TurnTokens, "turn-tokens", loadgen.DefaultTurnTokens, "sessions: mean length of a user's message")
	flags.DurationVar(&talk.Think, "think", loadgen.DefaultThink, "sessions: mean pause between an answer and the next message")
	flags.Float64Var(&talk.LongShare, "long-share", 0, "sessions: share of them that open with a document, 0 to 1")
	flags.IntVar(&talk.LongTokens, "long-tokens", 0, "sessions: length of that document")
	return flags
}

// addSessions adds --sessions and what goes with it.
func (f *benchFlags) addSessions(flags *pflag.FlagSet) {
	flags.IntVar(&f.talk.Sessions, "sessions", 0, "play so many chats of several turns; --rate is then new sessions per second (default 4)")
	flags.AddFlagSet(sessionFlags(&f.talk))
}

// checkSessions refuses flags that would be ignored.
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
			return problem.New(problem.InvalidArgument, "%s and --sessions exclude each other", strings.Join(wrong, ", "))
		}
		return nil
	}
	sessionFlags(&loadgen.Conversation{}).VisitAll(func(flag *pflag.Flag) { refuse(flag.Name) })
	if len(wrong) > 0 {
		return problem.New(problem.InvalidArgument, "%s: only sessions have that", strings.Join(wrong, ", ")).WithHint("add --sessions N")
	}
	return nil
}
