package sim

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
)

// adapters are the LoRA adapters of an engine, by name with their paths. They change no text. Safe for
// concurrent use.
type adapters struct {
	mu    sync.Mutex
	paths map[string]string
}

// has reports whether an adapter is loaded.
func (a *adapters) has(name string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, ok := a.paths[name]
	return ok
}

// all is a copy.
func (a *adapters) all() map[string]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.paths)
}

// appendAdapters appends the adapters to the entries of /v1/models.
func (s api) appendAdapters(list []byte, now int64) []byte {
	loaded, base := s.set.adapters.all(), mustMarshal(s.cfg.Names[0])
	for _, name := range slices.Sorted(maps.Keys(loaded)) {
		list = append(list, ',')
		list = fmt.Appendf(list, modelFormat, mustMarshal(name), now, mustMarshal(loaded[name]), base, "null",
			s.newID())
	}
	return list
}

// loadAdapter answers POST /v1/load_lora_adapter of the development mode.
func (s api) loadAdapter(w http.ResponseWriter, r *http.Request) {
	f, apiErr := s.body(r)
	if apiErr != nil {
		s.fail(w, r, apiErr)
		return
	}
	name, path, set := f.str("lora_name"), f.str("lora_path"), s.set.adapters
	set.mu.Lock()
	defer set.mu.Unlock()
	_, isLoaded := set.paths[name]
	switch {
	case f.fault != nil:
		s.fail(w, r, f.fault)
	case name == "" || path == "":
		s.fail(w, r, badRequest("", "Both 'lora_name' and 'lora_path' must be provided."))
	case isLoaded:
		s.fail(w, r, badRequest("", "The lora adapter '%s' has already been loaded.", name))
	default:
		if set.paths == nil {
			set.paths = map[string]string{}
		}
		set.paths[name] = path
		s.succeed(w, fmt.Sprintf("Success: LoRA adapter '%s' added successfully.", name))
	}
}

// unloadAdapter answers POST /v1/unload_lora_adapter of the development mode.
func (s api) unloadAdapter(w http.ResponseWriter, r *http.Request) {
	f, apiErr := s.body(r)
	if apiErr != nil {
		s.fail(w, r, apiErr)
		return
	}
	name, set := f.str("lora_name"), s.set.adapters
	set.mu.Lock()
	defer set.mu.Unlock()
	switch _, isLoaded := set.paths[name]; {
	case f.fault != nil:
		s.fail(w, r, f.fault)
	case !isLoaded:
		s.fail(w, r, &apiError{
			status: http.StatusNotFound, kind: "NotFoundError",
			message: fmt.Sprintf("The lora adapter '%s' cannot be found.", name),
		})
	default:
		delete(set.paths, name)
		s.succeed(w, fmt.Sprintf("Success: LoRA adapter '%s' removed successfully.", name))
	}
}

func (s api) succeed(w http.ResponseWriter, text string) {
	writeBody(w, http.StatusOK, "text/plain; charset=utf-8", []byte(text))
}

// pause answers POST /pause of the development mode. The engine goes on computing.
func (s api) pause(w http.ResponseWriter, _ *http.Request) {
	s.paused.Store(true)
	s.writeJSON(w, http.StatusOK, []byte(`{"status":"paused"}`))
}

func (s api) resume(w http.ResponseWriter, _ *http.Request) {
	s.paused.Store(false)
	s.writeJSON(w, http.StatusOK, []byte(`{"status":"resumed"}`))
}

func (s api) isPaused(w http.ResponseWriter, _ *http.Request) {
	s.writeJSON(w, http.StatusOK, fmt.Appendf(nil, `{"is_paused":%t}`, s.paused.Load()))
}
