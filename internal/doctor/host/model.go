package host

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/doctor"
)

// models looks at what each application loads.
func models(apps []*app.Application, env environment) []doctor.Model {
	var out []doctor.Model
	for _, a := range apps {
		if a.Engine.Kind == app.KindVLLM || a.Engine.Kind == app.KindSGLang {
			out = append(out, findModel(a, env))
		}
	}
	return out
}

func findModel(a *app.Application, env environment) doctor.Model {
	out := doctor.Model{App: a.PoolName(), Source: a.Model.Source}
	format, _ := a.Engine.Args.Get("load-format")
	out.Dummy = format == "dummy"
	source := a.Model.Source
	info, err := os.Stat(source)
	switch {
	case err == nil && info.IsDir():
		out.Folder = source
	case err == nil: // one file, such as model.gguf
		out.Folder = source
		addWeights(&out, source)
		return out
	case strings.HasPrefix(source, "~"):
		out.Error = "engines do not replace ~ by the home folder"
		return out
	case isPath(source):
		out.Error = plain(err)
		return out
	case strings.Contains(source, "://"):
		return out
	default:
		out.Remote = true
		findCached(&out, a, env)
	}
	if out.Folder != "" {
		inspectModel(&out)
	}
	return out
}

// isPath reports whether a source cannot be the name of a model of a hub, NAME or OWNER/NAME.
func isPath(source string) bool {
	return filepath.IsAbs(source) || strings.HasPrefix(source, ".") || strings.Count(source, "/") > 1 &&
		!strings.Contains(source, "://")
}

// findCached looks for a model of a hub in the cache of huggingface_hub.
func findCached(out *doctor.Model, a *app.Application, env environment) {
	get := func(name string) string {
		if value, ok := a.Engine.Env[name]; ok {
			return value
		}
		return env.get(name)
	}
	for _, name := range []string{"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} {
		if value := get(name); value != "" && value != "0" {
			out.Offline = name + "=" + value
		}
	}
	hub := get("HF_HUB_CACHE")
	if home := get("HF_HOME"); hub == "" && home != "" {
		hub = filepath.Join(home, "hub")
	}
	if hub == "" {
		hub = filepath.Join(get("HOME"), ".cache", "huggingface", "hub")
	}
	folder := filepath.Join(hub, "models--"+strings.ReplaceAll(a.Model.Source, "/", "--"))
	revision, ok := a.Engine.Args.Get("revision")
	if !ok {
		revision = "main"
	}
	commit := fmt.Sprint(revision)
	//nolint:gosec // the cache of the user's models
	if text, err := os.ReadFile(filepath.Join(folder, "refs", commit)); err == nil {
		commit = strings.TrimSpace(string(text))
	}
	snapshot := filepath.Join(folder, "snapshots", commit)
	//nolint:gosec // as above
	if info, err := os.Stat(snapshot); err == nil && info.IsDir() {
		out.Folder = snapshot
	}
}

// inspectModel looks at the files of a folder: the config, the weights that its index names, the tokenizer.
func inspectModel(out *doctor.Model) {
	if _, err := readJSON(filepath.Join(out.Folder, "config.json")); err != nil {
		out.Error = err.Error()
		return
	}
	out.NoTokenizer = !hasAny(out.Folder, "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
		"vocab.json", "tekken.json", "*.tiktoken")
	if out.Dummy {
		return
	}
	names, err := weightFiles(out.Folder)
	if err != nil {
		out.Error = err.Error()
		return
	}
	for _, name := range names {
		addWeights(out, filepath.Join(out.Folder, name))
	}
}

// addWeights looks at one file with weights.
func addWeights(out *doctor.Model, path string) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		out.Missing = append(out.Missing, filepath.Base(path))
		return
	case err != nil:
		out.Damaged = append(out.Damaged, plain(err))
		return
	}
	out.Files++
	out.Bytes += uint64(info.Size())
	if fault := weightFault(path, info.Size()); fault != "" {
		out.Damaged = append(out.Damaged, filepath.Base(path)+" "+fault)
	}
}

// weightFiles lists the files with weights: those that an index names, else those that are there.
func weightFiles(folder string) ([]string, error) {
	for _, index := range []string{"model.safetensors.index.json", "pytorch_model.bin.index.json"} {
		path := filepath.Join(folder, index)
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		text, err := readJSON(path)
		if err != nil {
			return nil, err
		}
		var content struct {
			Map map[string]string `json:"weight_map"`
		}
		if err := json.Unmarshal(text, &content); err != nil {
			return nil, fmt.Errorf("%s: %w", index, err)
		}
		var names []string
		for _, name := range content.Map {
			if !filepath.IsLocal(name) {
				return nil, fmt.Errorf("%s names %q, which is not in the folder", index, name)
			}
			names = append(names, name)
		}
		slices.Sort(names)
		return slices.Compact(names), nil
	}
	for _, pattern := range []string{"*.safetensors", "*.bin", "*.pt", "*.gguf"} {
		paths, err := filepath.Glob(filepath.Join(folder, pattern))
		if err != nil || len(paths) == 0 {
			continue
		}
		for i, path := range paths {
			paths[i] = filepath.Base(path)
		}
		return paths, nil
	}
	return nil, nil
}

func hasAny(folder string, patterns ...string) bool {
	for _, pattern := range patterns {
		if found, err := filepath.Glob(filepath.Join(folder, pattern)); err == nil && len(found) > 0 {
			return true
		}
	}
	return false
}

// maxJSON bounds a config or an index; that of the largest models is some MiB.
const maxJSON = 64 << 20

// readJSON reads a file that holds one JSON object.
func readJSON(path string) ([]byte, error) {
	f, err := os.Open(path) //nolint:gosec // a file of the user's model
	if err != nil {
		return nil, errors.New(plain(err))
	}
	defer func() { _ = f.Close() }() // only read
	text, err := io.ReadAll(io.LimitReader(f, maxJSON))
	if err != nil {
		return nil, errors.New(plain(err))
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(text, &object); err != nil {
		return nil, fmt.Errorf("%s is no JSON object: %w", path, err)
	}
	return text, nil
}

// weightFault says what is wrong with a file of weights, as far as its first bytes and its size tell; "" =
// nothing.
func weightFault(path string, size int64) string {
	f, err := os.Open(path) //nolint:gosec // a file of the user's model
	if err != nil {
		return plain(err)
	}
	defer func() { _ = f.Close() }() // only read
	head := make([]byte, 8)
	if _, err := io.ReadFull(f, head); err != nil {
		return "is empty"
	}
	const pointer = "version https://git-lfs"
	if strings.HasPrefix(pointer, string(head)) {
		return "is a pointer of Git LFS: run `git lfs pull` there"
	}
	if !strings.HasSuffix(path, ".safetensors") {
		return ""
	}
	length := binary.LittleEndian.Uint64(head)
	if length > maxJSON || int64(length) > size {
		return "is no file of safetensors, or it is cut"
	}
	header := make([]byte, length)
	if _, err := io.ReadFull(f, header); err != nil {
		return "is cut within its header"
	}
	end, err := tensorsEnd(header)
	switch whole := end + int64(len(head)) + int64(length); {
	case err != nil:
		return "has a header that cannot be read: " + err.Error()
	case size < whole:
		return fmt.Sprintf("is cut: it has %d of %d bytes", size, whole)
	}
	return ""
}

// errOffsets refuses a header whose offsets make no sense.
var errOffsets = errors.New("the offsets of a tensor make no sense")

// tensorsEnd reads the header of a file of safetensors: where its last tensor ends, behind the header.
func tensorsEnd(header []byte) (int64, error) {
	var tensors map[string]json.RawMessage
	if err := json.Unmarshal(header, &tensors); err != nil {
		return 0, err
	}
	end := int64(0)
	for name, text := range tensors {
		if name == "__metadata__" {
			continue
		}
		var tensor struct {
			Offsets []int64 `json:"data_offsets"`
		}
		if err := json.Unmarshal(text, &tensor); err != nil {
			return 0, err
		}
		if o := tensor.Offsets; len(o) != 2 || o[0] < 0 || o[1] < o[0] || o[1] > maxTensors {
			return 0, errOffsets
		}
		end = max(end, tensor.Offsets[1])
	}
	return end, nil
}

// maxTensors bounds the bytes of one file's tensors, so that sums do not overflow.
const maxTensors = 1 << 50
