package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/problem"
)

// Bounds of chat, in MiB: what it reads from stdin, and an error or one line of a stream.
const (
	maxChatText   = 1
	maxChatAnswer = 4
)

func newChat(e *env) *cobra.Command {
	var url, keyEnv string
	cmd := &cobra.Command{
		Use:   "chat [MODEL] [TEXT] [flags]",
		Short: "send a message to a model, and print the answer as it comes",
		Long: `chat sends TEXT to the OpenAI endpoint and prints the answer as it comes; what a model thinks
before its answer goes to stderr. Without TEXT, or with - for it, it sends what stdin has. A single argument
is TEXT, for the first model that the endpoint lists.`,
		Example: `  dpserve chat "Hello"
  dpserve chat Qwen/Qwen3-8B "Hello"
  git diff | dpserve chat demo -`,
		Args: requireArgs(0, "MODEL", "TEXT"),
	}
	cmd.Flags().StringVar(&url, "url", "", "`URL` of the endpoint; default: that of the node of DPSERVE_ADDR")
	addKeyFlag(cmd.Flags(), &keyEnv)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		model := ""
		if len(args) == 2 {
			model, args = args[0], args[1:]
		}
		key, err := keyOf(e, keyEnv)
		if err != nil {
			return err
		}
		text, err := readChat(e, args)
		if err != nil {
			return err
		}
		if url, err = endpointURL(cmd.Context(), e, "chat", "--url", url); err != nil {
			return err
		}
		if model == "" {
			if model, err = firstModel(cmd.Context(), url, keyEnv); err != nil {
				return err
			}
		}
		return runChat(cmd.Context(), e, url, key, model, text)
	}
	return cmd
}

// readChat returns the text of the command line, else of stdin.
func readChat(e *env, args []string) (string, error) {
	if text := strings.Join(args, ""); text != "" && text != "-" {
		return text, nil
	}
	text, err := readInput(e, "-", maxChatText, "shorten it", "give the text as an argument")
	if err == nil && len(bytes.TrimSpace(text)) == 0 {
		err = usageError("chat", "chat wants a text, and stdin is empty")
	}
	return string(text), err
}

func runChat(ctx context.Context, e *env, url, key, model, text string) error {
	body, err := json.Marshal(map[string]any{
		"model": model, "stream": true, "messages": []map[string]string{{"role": "user", "content": text}},
	})
	if err != nil {
		return err
	}
	url += "/v1/chat/completions"
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	// the environment's proxy must not see prompts
	answer, err := (&http.Client{Transport: &http.Transport{}}).Do(req)
	if err != nil {
		return problem.New(problem.Unavailable, "no answer from %s: %w", url, errors.Unwrap(err)).
			WithHint("is an OpenAI endpoint there? name another with --url")
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK {
		return refusedChat(url, answer)
	}
	err = printChat(e, answer.Body)
	_, _ = fmt.Fprintln(e.io.Out)
	return err
}

// refusedChat returns the error of an answer that is not 200, in the endpoint's own words.
func refusedChat(url string, answer *http.Response) error {
	text, _ := io.ReadAll(io.LimitReader(answer.Body, maxChatAnswer<<20)) // what came is shown
	says := cmp.Or(openai.ParseError(text).Message, http.StatusText(answer.StatusCode))
	switch answer.StatusCode {
	case http.StatusUnauthorized:
		return problem.New(problem.Unauthenticated, "%s", says).
			WithHint("name the variable that has the key: --api-key-env NAME")
	case http.StatusNotFound:
		return problem.New(problem.NotFound, "%s", says).
			WithHint("leave MODEL out for the first of the endpoint")
	}
	return problem.New(problem.Upstream, "%s answers %d: %s", url, answer.StatusCode, says).
		WithHint(hintRanks)
}

const hintRanks = "`dpserve status` says how the ranks are"

// chatEvent is an event of the stream, as far as chat reads it.
type chatEvent struct {
	Choices []struct {
		Delta struct {
			Content          string `json:"content"`
			Reasoning        string `json:"reasoning"`         // vLLM
			ReasoningContent string `json:"reasoning_content"` // SGLang
		} `json:"delta"`
		FinishReason string `json:"finish_reason"`
	} `json:"choices"`
}

// printChat prints the text of a stream until it ends. What the model sends must not move the cursor of the
// user's terminal; a file or a pipe gets the text as it is.
func printChat(e *env, stream io.Reader) error {
	finish, isThinking := "", false
	lines := bufio.NewScanner(stream)
	lines.Buffer(nil, maxChatAnswer<<20)
	for lines.Scan() {
		data := openai.EventData(lines.Bytes())
		var event chatEvent
		if data == nil || json.Unmarshal(data, &event) != nil { // a blank line, a comment, [DONE]
			continue
		}
		if failed := openai.ParseError(data).Message; failed != "" {
			return problem.New(problem.Upstream, "the answer broke off: %s", failed).WithHint(hintRanks)
		}
		for _, c := range event.Choices {
			text := c.Delta.Content
			if e.io.OutTTY {
				text = cleanText(text)
			}
			thought := cleanText(cmp.Or(c.Delta.Reasoning, c.Delta.ReasoningContent))
			isThinking = isThinking || thought != ""
			if isThinking && text != "" {
				thought, isThinking = thought+"\n", false
			}
			_, _ = io.WriteString(e.io.Err, thought)
			_, _ = io.WriteString(e.io.Out, text)
			finish = cmp.Or(c.FinishReason, finish)
		}
	}
	switch err := lines.Err(); {
	case err != nil || finish == "":
		return problem.New(problem.Upstream, "the answer broke off: %w", cmp.Or(err, io.ErrUnexpectedEOF)).
			WithHint(hintRanks)
	case finish == "length":
		printMessage(e.io.Err, "the answer has reached its limit of tokens and was cut")
	}
	return nil
}
