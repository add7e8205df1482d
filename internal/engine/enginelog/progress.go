// Package enginelog reads the logs of vLLM and SGLang: what a starting engine is doing, and why one has
// failed. It knows the engines' messages by their words, so a line that a version of an engine words anew is
// not understood, and nothing else depends on it.
package enginelog

import (
	"bytes"
	"strings"
	"sync"
	"sync/atomic"
)

// pieceLimit bounds the bytes of a line that a Reader looks at. The messages that it knows begin within them.
const pieceLimit = 1 << 10

// Reader follows what an engine says of its start. It is safe for concurrent use.
type Reader struct {
	done atomic.Bool

	mu   sync.Mutex
	text string
}

// Progress says what the engine is doing, such as "loading weights 12 of 61"; "" as long as it has said
// nothing that the Reader understands.
func (r *Reader) Progress() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text
}

// Stop ends the reading: an engine that serves writes many lines that say nothing of its start.
func (r *Reader) Stop() { r.done.Store(true) }

// Read takes one line, or what a progress bar has drawn over a line.
func (r *Reader) Read(line []byte) {
	text := progressOf(string(line[:min(len(line), pieceLimit)]))
	if text == "" {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.text = text
}

// Stream returns a writer for one output stream of the engine. One goroutine writes to it.
func (r *Reader) Stream() *Stream { return &Stream{reader: r} }

// Stream cuts an output stream into lines. A carriage return ends a line too: progress bars write one before
// they draw themselves anew.
type Stream struct {
	reader *Reader
	piece  []byte // of the line that has not ended, at most pieceLimit
}

// Write implements io.Writer. It never fails.
func (s *Stream) Write(p []byte) (int, error) {
	if s.reader.done.Load() {
		return len(p), nil
	}
	for rest := p; ; {
		end := bytes.IndexAny(rest, "\r\n")
		if end < 0 {
			s.take(rest)
			return len(p), nil
		}
		s.take(rest[:end])
		s.reader.Read(s.piece)
		s.piece, rest = s.piece[:0], rest[end+1:]
	}
}

func (s *Stream) take(p []byte) {
	s.piece = append(s.piece, p[:min(len(p), pieceLimit-len(s.piece))]...)
}

// Parts of sentences that several messages share.
const (
	loading     = "loading weights"
	compiling   = "compiling (torch.compile)"
	capturing   = "capturing graphs"
	kernels     = "compiling kernels"
	downloading = "downloading"
	opening     = "opening its API"
	weightsIn   = "weights are loaded"
	graphsDone  = "CUDA graphs are captured"
)

// stages are the messages of vLLM and SGLang that mark a step of the start. The first one that a line
// contains counts.
//
//nolint:gochecknoglobals // a constant table
var stages = []message{
	// vLLM
	{"non-default args:", nil, "reading its settings"},
	{"Initializing a V1 LLM engine", nil, "starting its engine core"},
	{"Starting to load model", nil, "loading the model"},
	{"Loading drafter model", nil, "loading the draft model"},
	{"Time spent downloading weights", nil, loading},
	{"Loading weights took", nil, weightsIn},
	{
		"Model loading took", expr(`Model loading took ([\d.]+ ?Gi?B)`),
		weightsIn + ", $1 per GPU",
	},
	{"Encoder cache will be initialized", nil, "measuring its memory"},
	{"for vLLM's torch.compile", nil, compiling},
	{"Dynamo bytecode transform time", nil, compiling},
	{"Compiling a graph for", nil, compiling},
	{"Cache the graph of", nil, compiling},
	{"Directly load the compiled graph", nil, "loading compiled graphs"},
	{"Directly load AOT compilation", nil, "loading compiled graphs"},
	{"torch.compile and initial profiling", nil, "measuring its memory"},
	{"Initial profiling/warmup run took", nil, "measuring its memory"},
	{"Warming up model for the compilation", nil, compiling},
	{"Warming up done", nil, opening},
	{"JIT kernel warmup starting", nil, kernels},
	{
		"Available KV cache memory", expr(`Available KV cache memory: ([\d.]+ ?Gi?B)`),
		"making its KV cache of $1",
	},
	{
		"KV cache size", expr(`KV cache size: ([\d,]+ tokens)`),
		"KV cache of $1 is made",
	},
	{"Graph capturing finished", nil, graphsDone},
	{"init engine (profile, create kv cache, warmup model) took", nil, opening},
	{"Starting vLLM server on", nil, opening},
	{"Starting vLLM API server", nil, opening},
	{"Application startup complete", nil, "its API is open"},

	// SGLang
	{"server_args=ServerArgs(", nil, "reading its settings"},
	{"Init torch distributed begin", nil, "connecting its processes"},
	{"Load weight begin", nil, loading},
	{"Load weight end", nil, weightsIn},
	{
		"is allocated", expr(`is allocated\..*#tokens: (\d+)`),
		"KV cache of $1 tokens is made",
	},
	{"Memory pool end", nil, "KV cache is made"},
	{"DeepGEMM JIT Pre-Compile session", nil, kernels + ", which takes 10 to 20 minutes the first time"},
	{"Try DeepGEMM JIT Compiling", nil, kernels},
	{
		"Capture ", expr(`Capture (?:\S+ ){0,3}(?i:cuda) graph begin`),
		capturing,
	},
	{
		"Capture ", expr(`Capture (?:\S+ ){0,3}(?i:cuda) graph end`),
		graphsDone,
	},
	{"max_total_num_tokens=", nil, opening},
	{"The server is fired up and ready to roll", nil, "its API is open"},
}

// A progress bar, in the form of the weight loaders ("17% Completed | 11/64 [") or of the library behind both
// engines ("46%|████▌     | 16/35 [", "40%|███ | 2.00G/5.00G [").
var bar = expr(`\d{1,3}%[^|\d]{0,16}\|(?:[^|]*\|)? {0,3}([\d.]+[kMGT]?)/([\d.]+[kMGT]?) \[`)

// bars are the bars that are understood, by a word of their description. The first one counts.
//
//nolint:gochecknoglobals // a constant table
var bars = []struct{ word, text string }{
	{"checkpoint shards", loading},
	{"Multi-thread loading", loading},
	{"Loading safetensors using", loading},
	{"Capturing", capturing},
	{"Compiling", kernels},
	{"Pre-compiling", kernels},
	{"warmup", kernels},
	{"Fetching", "downloading files"},
	{"Downloading", downloading},
	{".safetensors", downloading},
}

var (
	fileName = expr(`[\w.-]{1,80}\.safetensors`)
	modeName = expr(`graphs (\([A-Za-z][A-Za-z_, -]{0,40}\))`) // vLLM has several passes
)

// progressOf says what a line tells of the start; "" if nothing.
func progressOf(line string) string {
	if strings.Contains(line, "%") {
		if text := progressOfBar(line); text != "" {
			return text
		}
	}
	for i := range stages {
		if text := stages[i].explain(line); text != "" {
			return text
		}
	}
	return ""
}

// progressOfBar reads the last bar of a line: some collectors of logs join what a bar has drawn.
func progressOfBar(line string) string {
	all := bar().FindAllStringSubmatchIndex(line, -1)
	if len(all) == 0 {
		return ""
	}
	begin, last := 0, all[len(all)-1]
	if len(all) > 1 {
		begin = all[len(all)-2][1]
	}
	title := line[begin:last[0]]
	for _, b := range bars {
		if strings.Contains(title, b.word) {
			part, whole := line[last[2]:last[3]], line[last[4]:last[5]]
			return b.text + " " + part + " of " + whole + detail(b.text, title)
		}
	}
	return ""
}

// detail says which file or which pass a bar counts; "" if its title does not.
func detail(text, title string) string {
	switch text {
	case downloading:
		if file := fileName().FindString(title); file != "" {
			return " (" + file + ")"
		}
	case capturing:
		if mode := modeName().FindStringSubmatch(title); mode != nil {
			return " " + mode[1]
		}
	}
	return ""
}
