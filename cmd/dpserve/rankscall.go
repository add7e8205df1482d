package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
)

func newRanksCall(e *env) *cobra.Command {
	var method, data string
	var ranks []string
	var output *format
	cmd := &cobra.Command{
		Use:   "call APP PATH [flags]",
		Short: "make a control call to the engines",
		Long: `call asks the engine of each rank, at the same time, to load or unload a LoRA adapter, to
sleep or wake up, to pause or resume, to drop its caches, to abort requests or to profile, and shows each
answer. PATH is the engine's own, with its query. A rank that is put to sleep or paused takes no request
until it is woken; one whose cache is dropped counts as empty. An engine has 25 s for its answer.`,
		Example: `  dpserve ranks call chat '/sleep?level=1'
  dpserve ranks call chat /wake_up --rank 0/1
  dpserve ranks call chat /v1/load_lora_adapter -d '{"lora_name": "sql", "lora_path": "/models/sql"}'`,
		Args: requireArgs(2, "APP", "PATH"),
	}
	cmd.Flags().StringVarP(&method, "request", "X", "POST", "HTTP `method`")
	cmd.Flags().StringVarP(&data, "data", "d", "", "JSON `body`; - reads it from stdin")
	cmd.Flags().StringSliceVar(&ranks, "rank", nil, "`GROUP/RANK` to call; repeatable; default: all")
	output = addOutput(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		body := []byte(data)
		if data == "-" {
			var err error
			if body, err = io.ReadAll(e.io.In); err != nil {
				return fmt.Errorf("read stdin: %w", err)
			}
		}
		return runRanksCall(cmd.Context(), e, args, strings.ToUpper(method), ranks, body, *output)
	}
	return cmd
}

func runRanksCall(
	ctx context.Context, e *env, args []string, method string, ranks []string, body []byte, f format,
) error {
	return e.withAdmin(func(cluster admin) error {
		got, err := cluster.CallEngines(ctx, args[0], method, args[1], ranks, body)
		if err != nil {
			return err
		}
		if err := answersListing(&got).write(e.io, f); err != nil {
			return err
		}
		refused := 0
		for i := range got.Answers {
			if got.Answers[i].Status/100 != 2 {
				refused++
			}
		}
		if refused > 0 {
			return problem.New(problem.Conflict, "%d of %d ranks did not do it", refused, len(got.Answers)).
				WithHint("the table has each engine's answer")
		}
		return nil
	})
}

// maxAnswerShown cuts an engine's answer in the table, in bytes.
const maxAnswerShown = 200

func answersListing(got *client.RankAnswers) *listing {
	var names []string
	t := &table{head: []string{"RANK", "NODE", "STATUS", "TOOK", "ANSWER"}}
	for i := range got.Answers {
		a := &got.Answers[i]
		name := fmt.Sprintf("%s/%d/%d", a.Pool, a.Group, a.Rank)
		status, text := fmt.Sprint(a.Status), strings.Join(strings.Fields(a.Body), " ")
		if a.Error != "" {
			status, text = "-", a.Error
		}
		if len(text) > maxAnswerShown {
			text = strings.ToValidUTF8(text[:maxAnswerShown], "") + "…"
		}
		if text == "" {
			text = "-"
		}
		names = append(names, name)
		t.add(cells(name, a.Node, status, fmt.Sprintf("%dms", a.TookMs), text)...)
	}
	return &listing{document: got, names: names, table: func(bool) []*table { return []*table{t} }}
}
