package ingress

import (
	"cmp"
	"log/slog"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/tracefile"
)

// createRecorder begins the file of a trace; without a path there is none.
func createRecorder(path string, log *slog.Logger) (*tracefile.Recorder, error) {
	if path == "" {
		return nil, nil //nolint:nilnil // no trace is no error
	}
	recorder, err := tracefile.Create(path, log)
	if err != nil {
		return nil, problem.New(problem.InvalidArgument, "--record-trace: %w", err).
			WithHint("name a file in a folder that dpserve may write")
	}
	log.Info("requests are recorded", slog.String("file", recorder.Path()))
	return recorder, nil
}

// beginRecord notes when the request came, and the hashes of its prompt while the body is there.
// It goes by what the client sent, so that equal prompts have equal hashes under each policy. The rest of an
// answer that broke is no request of its own.
func (req *request) beginRecord() {
	recorder, p, scan := req.in.recorder, &req.prompt, &req.scan
	isClients := req.hold == nil && req.why == nil && req.route.Generates()
	if recorder == nil || !isClients || !req.record.At.IsZero() {
		return
	}
	req.record = tracefile.Request{At: req.start, Input: p.tokens}
	if scan.IsHead {
		return // most of the prompt is not known
	}
	body := req.body.b
	salt := append([]byte(req.app.router.name+"\x00"+p.adapter+"\x00"), scan.CacheSalt...)
	ids, ok := scan.TokenIDs(nil, body)
	if !ok {
		salt = append(append(salt, 0), body[scan.Tools.Start:scan.Tools.End]...)
	}
	req.record.Blocks = recorder.Hashes(string(salt), ids, scan.Text(body))
}

// endRecord records the request, also one that was refused. The engine's count of the prompt is exact.
func (req *request) endRecord() {
	if req.record.At.IsZero() {
		return
	}
	req.record.Input = cmp.Or(req.usage.PromptTokens, req.record.Input)
	req.record.Output = req.outputTokens()
	req.in.recorder.Add(req.record)
	req.record = tracefile.Request{}
}
