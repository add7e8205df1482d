package enginelog

import (
	"slices"
	"strings"
)

// depth orders the processes of an engine: the front end waits for its core, and the core for its workers.
type depth uint8

const (
	inFront depth = iota
	inCore
	inWorker
)

// process is a process of an engine, as far as a line names it.
type process struct {
	name  string
	depth depth
}

// exceptionChain is exceptions of one process, each raised while the one before was handled.
type exceptionChain struct {
	process
	isFatal    bool
	isOver     bool     // no further exception of the chain is announced
	exceptions []string // without consequences
	lines      []string // of its exceptions and their messages
	raisedAt   int      // index of its last exception
	end        int      // index of the last of its lines
}

// prefix is what engines put in front of their lines:
// "(EngineCore pid=9) ERROR 11-21 03:05:02 [core.py:390] ", "[rank0]: ", "[2025-06-19 15:12:27 TP0] ". Its
// groups are the process, the source file and the bracket.
var prefix = expr(`^((?:\([^)]{1,60}\) ?){0,2})` +
	`(?:(?:ERROR|CRITICAL) [\d-]{1,10} [\d:.,]{1,16} (?:\[([^\]]{1,120})\] ?)?)?(?:\[([^\]]{1,60})\]:? ?)?`)

// exception is the last line of a Python traceback, without its prefix.
var exception = expr(`^((?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception))(?:: (\S.*))?$`)

// Words around tracebacks.
var (
	// in front of the traceback of an exception that ends its process; others may have been handled
	fatal       = expr(`failed to start\.?$|hit an exception|encountered a fatal error|^Process \S{1,60}:$`)
	isChained   = expr(`^(?:During handling of the above exception|The above exception was the direct cause)`)
	rankOfGroup = expr(`(?:DP|TP|PP|EP)\d.*$|^rank\d+$`) // in a bracket; SGLang writes the time before it
)

const (
	tracebackBegins = "Traceback (most recent call last):"
	messageLines    = 8 // lines behind an exception that may belong to its message
)

// consequences are exceptions that follow from another process's failure, or from the end of the engine.
//
//nolint:gochecknoglobals // a constant table
var consequences = []string{
	"Engine core initialization failed", "WorkerProc initialization failed", "EngineDeadError",
	"EngineCore encountered an issue", "Frontend process failed", "scheduler died during initialization",
	"Initialization failed. Please see the error messages above", "Worker failed with error",
	"CancelledError", "BrokenPipeError", "ConnectionResetError", "Connection closed by peer", "EOFError",
	"ProcessLookupError", "leaked",
}

// chainReader finds the chains in the mixed lines of an engine's processes.
type chainReader struct {
	found   []*exceptionChain
	newest  map[string]*exceptionChain // by the name of the process
	isDying map[string]bool            // the process has announced a fatal exception
	bare    process                    // whose traceback the lines without a prefix belong to
}

// rootCause is the chain that the others follow from; nil if the lines show none: the first one that ended
// its process, else the first one of the deepest process. A front end writes the exception that ends it last.
func rootCause(lines []string) *exceptionChain {
	r := chainReader{newest: map[string]*exceptionChain{}, isDying: map[string]bool{}}
	for i, l := range lines {
		r.read(i, l)
	}
	var root *exceptionChain
	for _, f := range r.found {
		if len(f.exceptions) > 0 && (root == nil || f.isFatal && !root.isFatal ||
			!root.isFatal && (f.depth > root.depth || f.depth == inFront && root.depth == inFront)) {
			root = f
		}
	}
	return root
}

func (r *chainReader) read(i int, line string) {
	from, text := r.cutPrefix(line)
	last := r.newest[from.name]
	exception := exception().FindStringSubmatch(text)
	switch {
	case strings.TrimSpace(text) == "":
	case exception != nil:
		if last == nil || last.isOver {
			last = r.begin(from)
		}
		last.add(i, text, exception[1], exception[2])
	case isChained().MatchString(text):
		if last != nil {
			last.isOver = false
		}
	case strings.Contains(text, tracebackBegins):
		r.isDying[from.name] = r.isDying[from.name] || fatal().MatchString(text)
		if last == nil || last.isOver {
			r.begin(from)
		}
	case fatal().MatchString(text):
		r.isDying[from.name] = true
	case last != nil && last.isOver && i <= last.raisedAt+messageLines:
		last.lines, last.end = append(last.lines, text), i
	}
}

// cutPrefix splits a line into its process and its text. SGLang and Python's multiprocessing name the process
// in front of a traceback only.
func (r *chainReader) cutPrefix(line string) (process, string) {
	m := prefix().FindStringSubmatch(line)
	name, file, bracket, text := m[1], m[2], m[3], line[len(m[0]):]
	if name == "" {
		name = rankOfGroup().FindString(bracket)
	}
	p := process{name, depthOf(name)}
	switch {
	case name != "":
	case file != "": // older versions of vLLM name no process
		p = process{file, depthOf(file)}
	case m[0] == "" && strings.HasPrefix(text, "Process "):
		p = process{text, max(depthOf(text), inCore)}
	case m[0] == "":
		return r.bare, text
	}
	r.bare = p
	return p, text
}

// depthOf is the depth of the process that has a name, or that logs from a source file.
func depthOf(name string) depth {
	switch {
	case strings.Contains(name, "Worker"), strings.HasPrefix(name, "multiproc_executor.py"),
		strings.HasPrefix(name, "rank"):
		return inWorker
	case strings.Contains(name, "EngineCore"), strings.HasPrefix(name, "core.py"),
		rankOfGroup().MatchString(name):
		return inCore
	}
	return inFront
}

func (r *chainReader) begin(from process) *exceptionChain {
	f := &exceptionChain{process: from, isFatal: r.isDying[from.name]}
	r.isDying[from.name] = false
	r.found = append(r.found, f)
	r.newest[from.name] = f
	return f
}

// add adds an exception to the chain.
func (f *exceptionChain) add(i int, line, name, message string) {
	f.isOver, f.raisedAt, f.end = true, i, i
	f.lines = append(f.lines, line)
	if slices.ContainsFunc(consequences, func(c string) bool { return strings.Contains(line, c) }) {
		return
	}
	text := name[strings.LastIndexByte(name, '.')+1:]
	if message != "" {
		text += ": " + cutAt(message, hintWords, cutMark)
	}
	f.exceptions = append(f.exceptions, text)
}

// words are the engine's own words: the first exception, and the last one that followed from it.
func (f *exceptionChain) words() string {
	first, last := f.exceptions[0], f.exceptions[len(f.exceptions)-1]
	if last == first {
		return "the engine says " + first
	}
	return "the engine says " + first + "; then " + last
}
