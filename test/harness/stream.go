package harness

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// Stream is what a client saw of one streaming request.
type Stream struct {
	Status   int
	Rank     string // GROUP/RANK from the response headers
	Prefill  string // GROUP/RANK of the prefill rank, likewise; "" = none
	Way      string // how the prompt was computed, likewise: remote, local, fallback
	Attempts string
	First    time.Duration // to the first content
	Last     time.Duration // to the last content
	Gap      time.Duration // longest between two pieces of content
	Total    time.Duration // to the end
	Chunks   int
	Text     string
	Finish   string
	Usage    Usage  // zero if the stream has none
	Done     bool   // [DONE] seen
	Error    string // code of an error event, or of the JSON error under a non-200 status
	Err      error  // transport error (a cut stream), or an event that one stream does not have

	id       string
	hasRole  bool
	hasUsage bool
}

// Usage is the usage of a stream that was asked for it.
type Usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
}

// FirstByte says whether any content reached the client.
func (s *Stream) FirstByte() bool { return s.Chunks > 0 }

// Whole says whether the answer ended by itself, without a cut connection.
func (s *Stream) Whole() bool { return s.Err == nil }

// OK says whether the stream ended without an error.
func (s *Stream) OK() bool {
	return s.Err == nil && s.Status == http.StatusOK && s.Finish != "" && s.Error == "" && s.Done
}

func (s *Stream) String() string {
	pair := ""
	if s.Way != "" {
		pair = fmt.Sprintf(" (%s, prefill rank %q)", s.Way, s.Prefill)
	}
	return fmt.Sprintf("status %d rank %s%s attempts %s chunks %d finish %q done %v error %q err %v",
		s.Status, s.Rank, pair, s.Attempts, s.Chunks, s.Finish, s.Done, s.Error, s.Err)
}

// StreamChat runs one streaming chat request to its end.
func (r *Real) StreamChat(ctx context.Context, model, prompt string, maxTokens int) *Stream {
	start := time.Now()
	resp, err := r.Post(ctx, "/v1/chat/completions", Chat(model, prompt, maxTokens, true))
	if err != nil {
		return &Stream{Err: err}
	}
	defer resp.Body.Close()
	return readStream(resp, start)
}

// readStream reads an answer to its end.
func readStream(resp *http.Response, start time.Time) *Stream {
	s := headOf(resp)
	var text strings.Builder
	defer func() { s.Text, s.Total = text.String(), time.Since(start) }()
	if resp.StatusCode != http.StatusOK {
		b, err := io.ReadAll(resp.Body)
		s.Err, s.Error = err, errorCode(b)
		return s
	}
	sc := bufio.NewReader(resp.Body)
	for {
		line, err := sc.ReadString('\n')
		if data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: "); ok {
			s.event(data, start, &text)
		}
		if err != nil {
			if err != io.EOF {
				s.Err = err
			}
			return s
		}
	}
}

// readWhole reads an answer that is not streamed.
func readWhole(resp *http.Response, start time.Time) *Stream {
	s := headOf(resp)
	var answer struct {
		Choices []struct {
			Message      struct{ Content string }
			Text         string
			FinishReason string `json:"finish_reason"`
		}
	}
	s.Err = json.NewDecoder(resp.Body).Decode(&answer)
	s.Total = time.Since(start)
	s.First, s.Last = s.Total, s.Total
	for _, c := range answer.Choices {
		s.Chunks, s.Text = s.Chunks+1, s.Text+c.Message.Content+c.Text
		s.Finish, s.Done = c.FinishReason, true
	}
	return s
}

// headOf reads an answer's status and headers.
func headOf(resp *http.Response) *Stream {
	return &Stream{
		Status:   resp.StatusCode,
		Rank:     resp.Header.Get("x-dpserve-group") + "/" + resp.Header.Get("x-dpserve-rank"),
		Prefill:  resp.Header.Get("x-dpserve-prefill-rank"),
		Way:      resp.Header.Get("x-dpserve-prefill"),
		Attempts: resp.Header.Get("x-dpserve-attempts"),
	}
}

// event takes one event, whose text goes to the end of text.
func (s *Stream) event(data string, start time.Time, text *strings.Builder) {
	if data == "[DONE]" {
		s.Done = true
		return
	}
	var ev streamEvent
	if json.Unmarshal([]byte(data), &ev) != nil {
		s.Err = fmt.Errorf("%w: bad event %q", ErrStream, data)
		return
	}
	if ev.Error != nil {
		s.Error = fmt.Sprint(ev.Error.Code)
		return
	}
	s.checkOnce(&ev, data)
	for _, c := range ev.Choices {
		if more := c.Delta.Content + c.Text; more != "" {
			now := time.Since(start)
			if s.Chunks++; s.Chunks == 1 {
				s.First = now
			} else {
				s.Gap = max(s.Gap, now-s.Last)
			}
			s.Last = now
			text.WriteString(more)
		}
		if c.FinishReason != nil {
			s.Finish = *c.FinishReason
		}
	}
	if ev.Usage != nil {
		s.Usage = *ev.Usage
	}
}

// streamEvent is the data of an event.
type streamEvent struct {
	ID      string
	Error   *struct{ Code any }
	Choices []struct {
		Index        int
		Delta        struct{ Role, Content string }
		Text         string
		FinishReason *string `json:"finish_reason"`
	}
	Usage *Usage
}

// checkOnce checks what is once in a stream, whichever engines it comes from: its id, its role, its usage,
// and the end of its first choice.
func (s *Stream) checkOnce(ev *streamEvent, data string) {
	isTwice := s.id != "" && ev.ID != "" && s.id != ev.ID || s.hasUsage && ev.Usage != nil
	if s.id == "" {
		s.id = ev.ID
	}
	s.hasUsage = s.hasUsage || ev.Usage != nil
	for _, c := range ev.Choices {
		isRole := c.Index == 0 && c.Delta.Role != ""
		isTwice = isTwice || isRole && s.hasRole || c.Index == 0 && s.Finish != ""
		s.hasRole = s.hasRole || isRole
	}
	if isTwice {
		s.Err = fmt.Errorf("%w: another id, role, end or usage: %q", ErrStream, data)
	}
}

func errorCode(b []byte) string {
	var e struct {
		Error *struct{ Code any }
	}
	if json.Unmarshal(b, &e) != nil || e.Error == nil {
		return ""
	}
	return fmt.Sprint(e.Error.Code)
}

// ReadStream reads a streaming answer to its end and closes it; its times count from now.
func ReadStream(resp *http.Response) *Stream {
	defer resp.Body.Close()
	return readStream(resp, time.Now())
}

// ReadAnswer reads an answer to its end, streamed or not, and closes it. began is when it was asked for.
func ReadAnswer(resp *http.Response, began time.Time) *Stream {
	defer resp.Body.Close()
	isStream := strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream")
	if resp.StatusCode == http.StatusOK && !isStream {
		return readWhole(resp, began)
	}
	return readStream(resp, began)
}
